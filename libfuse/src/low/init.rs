//! INIT of a program of the interface of inodes: capabilities and sizes.

use defuse_fuse::abi::{self as wire, InitIn, InitOut};

use super::abi::LowOperations;
use crate::abi::{ConnInfoThree, caps};
use crate::handle::{BIG_WRITES, READDIRPLUS, SPLICE, offer_of};
use crate::options::ApiVersion;

/// Bytes before the data of a request, as libfuse counts them.
pub(crate) const HEADER_ROOM: usize = 4096;
const PAGE: u32 = 4096;

/// `FUSE_CAP_SPLICE_READ`: the program takes data as a `struct fuse_bufvec`.
const SPLICE_READ: u32 = 1 << 9;
/// `FUSE_CAP_HANDLE_KILLPRIV`.
const HANDLE_KILLPRIV: u32 = 1 << 20;
/// `FUSE_CAP_NO_OPEN_SUPPORT`.
pub(crate) const NO_OPEN: u32 = 1 << 17;
/// `FUSE_CAP_NO_OPENDIR_SUPPORT`.
pub(crate) const NO_OPENDIR: u32 = 1 << 24;
/// `FUSE_CAP_EXPIRE_ONLY`.
pub(crate) const EXPIRE_ONLY: u32 = 1 << 26;

/// The bits of `capable` and `want`, with those of INIT. Bits below 17 are the same.
const BITS: &[(u32, u64)] = &[
    (NO_OPEN, wire::FUSE_NO_OPEN_SUPPORT),
    (caps::PARALLEL_DIROPS, wire::FUSE_PARALLEL_DIROPS),
    (caps::POSIX_ACL, wire::FUSE_POSIX_ACL),
    (HANDLE_KILLPRIV, wire::FUSE_HANDLE_KILLPRIV),
    (caps::CACHE_SYMLINKS, wire::FUSE_CACHE_SYMLINKS),
    (NO_OPENDIR, wire::FUSE_NO_OPENDIR_SUPPORT),
    (1 << 25, wire::FUSE_EXPLICIT_INVAL_DATA),
    (EXPIRE_ONLY, wire::FUSE_HAS_EXPIRE_ONLY),
];
const SAME: u32 = (1 << 17) - 1;
/// The capabilities that programs of libfuse 2 know.
const OF_TWO: u32 = (1 << 12) - 1;

/// The capabilities for INIT's bits.
fn capable(offered: u64, version: ApiVersion) -> u32 {
    let same = offered as u32 & SAME;
    if version == ApiVersion::Two {
        return same & OF_TWO;
    }
    let moved = BITS.iter().filter(|(_, bit)| offered & bit != 0);
    moved.fold(same, |all, (cap, _)| all | cap)
}

/// INIT's bits for the capabilities.
fn bits_of(want: u32) -> u64 {
    let moved = BITS.iter().filter(|(cap, _)| want & cap != 0);
    moved.fold(u64::from(want & SAME), |all, (_, bit)| all | bit)
}

/// The capabilities and sizes from which a program can choose, with those that libfuse wants by
/// default.
pub(crate) fn offer(
    version: ApiVersion,
    operations: &LowOperations,
    init: &InitIn,
    max_read: u32,
) -> ConnInfoThree {
    let offered = u64::from(init.flags) | u64::from(init.flags2) << 32;
    let capable = capable(offered, version);
    let mut want = caps::ASYNC_READ;
    if version == ApiVersion::Three {
        want |= caps::ATOMIC_O_TRUNC
            | caps::IOCTL_DIR
            | caps::AUTO_INVAL_DATA
            | caps::ASYNC_DIO
            | caps::PARALLEL_DIROPS
            | HANDLE_KILLPRIV;
    } else {
        want |= BIG_WRITES;
    }
    if operations.write_buf.is_some() {
        want |= SPLICE_READ;
    }
    if operations.getlk.is_some() && operations.setlk.is_some() {
        want |= caps::POSIX_LOCKS;
    }
    if operations.flock.is_some() {
        want |= caps::FLOCK_LOCKS;
    }
    if operations.readdirplus.is_some() {
        let both = operations.readdir.is_some();
        want |= if both { READDIRPLUS } else { READDIRPLUS_ONLY };
    }
    offer_of(version, init, max_read, (capable, want))
}

/// `FUSE_CAP_READDIRPLUS`, without the choice of the kernel.
const READDIRPLUS_ONLY: u32 = 1 << 13;

/// The reply to INIT, for what the program wants. Fails with text for the user.
pub(crate) fn reply(
    conn: &ConnInfoThree,
    offered: &ConnInfoThree,
    init: &InitIn,
) -> Result<InitOut, String> {
    let beyond = conn.want & !conn.capable & !SPLICE;
    if beyond != 0 {
        return Err(format!(
            "fuse: the program wants capabilities {beyond:#x} that the kernel does not have"
        ));
    }
    if conn.max_read != offered.max_read {
        return Err(format!(
            "fuse: init() requested different max_read from mount: {} instead of {}",
            conn.max_read, offered.max_read
        ));
    }
    let kernel = u64::from(init.flags) | u64::from(init.flags2) << 32;
    let always = wire::FUSE_BIG_WRITES | wire::FUSE_MAX_PAGES | wire::FUSE_INIT_EXT;
    let flags = (bits_of(conn.want) | always) & kernel;
    let max_write = conn.max_write.clamp(PAGE, offered.max_write);
    let max_background = conn.max_background.min(u32::from(u16::MAX)) as u16;
    let congestion = match conn.congestion_threshold {
        0 => u32::from(max_background) * 3 / 4,
        at => at,
    };
    Ok(InitOut {
        major: wire::FUSE_KERNEL_VERSION,
        minor: init.minor.min(wire::FUSE_KERNEL_MINOR_VERSION),
        max_readahead: conn.max_readahead.min(init.max_readahead),
        flags: flags as u32,
        max_background,
        congestion_threshold: congestion.min(u32::from(u16::MAX)) as u16,
        max_write,
        time_gran: conn.time_gran.clamp(1, 1_000_000_000),
        max_pages: max_write.div_ceil(PAGE) as u16,
        map_alignment: 0,
        flags2: (flags >> 32) as u32,
        max_stack_depth: 0,
        request_timeout: 0,
        unused: [0; 11],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(flags: u64) -> InitIn {
        let (low, high) = (flags as u32, (flags >> 32) as u32);
        InitIn {
            major: 7,
            minor: 45,
            max_readahead: 1 << 17,
            flags: low,
            flags2: high,
            unused: [0; 11],
        }
    }

    #[test]
    fn capabilities_are_the_bits_of_init_in_the_numbers_of_libfuse() {
        for (cap, bit) in BITS {
            assert_eq!((capable(*bit, ApiVersion::Three), bits_of(*cap)), (*cap, *bit));
            assert_eq!(capable(*bit, ApiVersion::Two), 0);
        }
        assert_eq!(capable(u64::MAX, ApiVersion::Two), 0xfff);
        assert_eq!(bits_of(caps::WRITEBACK_CACHE), wire::FUSE_WRITEBACK_CACHE);
    }

    #[test]
    fn nothing_is_answered_that_the_kernel_has_not_offered() {
        for version in [ApiVersion::Two, ApiVersion::Three] {
            for bit in (0..64).map(|bit| 1 << bit) {
                let init = kernel(bit);
                let conn = offer(version, &LowOperations::default(), &init, 0);
                let out = reply(&conn, &conn, &init).unwrap();
                let flags = u64::from(out.flags) | u64::from(out.flags2) << 32;
                assert_eq!(flags & !bit, 0);
            }
        }
    }

    #[test]
    fn a_program_gets_smaller_sizes_and_no_larger_ones() {
        let init = kernel(u64::MAX);
        let offered = offer(ApiVersion::Three, &LowOperations::default(), &init, 0);
        let answered = |max_write, max_background| {
            let conn = ConnInfoThree { max_write, max_background, ..offered };
            let out = reply(&conn, &offered, &init).unwrap();
            (out.max_write, out.max_pages, out.max_background, out.congestion_threshold)
        };
        assert_eq!(answered(offered.max_write, 0), (1 << 20, 256, 0, 0));
        assert_eq!(answered(u32::MAX, 100_000), (1 << 20, 256, 65535, 49151));
        assert_eq!(answered(1, 12), (4096, 1, 12, 9));
    }

    #[test]
    fn wishes_that_cannot_be_met_are_refused_with_the_reason() {
        let init = kernel(0);
        let offered = offer(ApiVersion::Three, &LowOperations::default(), &init, 4096);
        assert_eq!(offered.want, 0);
        let conn = ConnInfoThree { want: caps::POSIX_ACL, ..offered };
        assert!(reply(&conn, &offered, &init).unwrap_err().contains("capabilities 0x80000"));
        let conn = ConnInfoThree { max_read: 1, ..offered };
        assert!(reply(&conn, &offered, &init).unwrap_err().contains("different max_read"));
    }
}
