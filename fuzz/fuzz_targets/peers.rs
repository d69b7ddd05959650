//! Clients of several users make valid requests in any order to one server with files in memory. No
//! client may see or change anything that its user is not permitted to.

#![no_main]

use std::sync::Arc;

use defuse_memory::{MemoryFileSystem, MemoryOptions};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|script: &[u8]| {
    let options =
        MemoryOptions { root_perm: 0o755, size: Some(64 << 20), ..MemoryOptions::default() };
    defuse_socket::fuzz_peers(Arc::new(MemoryFileSystem::new(options)), script);
});
