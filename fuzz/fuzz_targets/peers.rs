//! Clients of several users on one server, with files in memory: whatever valid requests they make, in
//! whatever order, nobody sees or changes what its user may not.

#![no_main]

use std::sync::Arc;

use defuse_memory::{Memory, Options};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|script: &[u8]| {
    let options = Options { root_perm: 0o755, size: Some(64 << 20), ..Options::default() };
    defuse_fuse::fuzz_peers(Arc::new(Memory::new(options)), script);
});
