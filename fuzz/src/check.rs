//! Hostile images, checked and repaired.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| bedplate_model::fuzz::examine(input));
