//! Hostile images, written.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| bedplate_model::fuzz::work(input));
