//! The qcow2 format and its engine.
//!
//! Callers: `disk` and `image`. [`format`] is pure parsing and encoding.
#![forbid(unsafe_code)]

pub mod format;
