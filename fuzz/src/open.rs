//! Hostile images, opened for reading.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| bedplate_model::fuzz::open(input));
