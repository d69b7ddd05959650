//! A controller whose registers and completions the input falsifies: each operation of the driver
//! is answered once, no memory is lost, and everything ends.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|script: &[u8]| {
    defuse_nvme::fuzz_controller(&script[..script.len().min(1024)]);
});
