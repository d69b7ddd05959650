//! Paths of descriptors in `/proc`.

use std::os::fd::{AsRawFd, BorrowedFd};

/// The `/proc` path of the descriptor `fd`, NUL-terminated, without an allocation.
pub(crate) struct ProcPath {
    bytes: [u8; 32],
}

impl ProcPath {
    pub(crate) fn new(fd: BorrowedFd<'_>) -> Self {
        const PREFIX: &[u8] = b"/proc/self/fd/";
        let mut bytes = [0; 32];
        bytes[..PREFIX.len()].copy_from_slice(PREFIX);
        let mut digits = [0; 10];
        let (mut rest, mut at) = (fd.as_raw_fd().unsigned_abs(), digits.len());
        loop {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        bytes[PREFIX.len()..][..digits.len() - at].copy_from_slice(&digits[at..]);
        ProcPath { bytes }
    }

    pub(crate) fn as_c_str(&self) -> &std::ffi::CStr {
        // A prefix of 14 bytes and at most 10 digits leave NULs in 32 bytes.
        std::ffi::CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }

    /// The path of `name` below it.
    pub(crate) fn join(&self, name: &[u8]) -> Vec<u8> {
        let dir = self.as_c_str().to_bytes();
        [dir, b"/", name].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_proc_path_has_the_number_in_decimal() {
        let file = std::fs::File::open("/").unwrap();
        let path = ProcPath::new(file.as_fd());
        let expected = format!("/proc/self/fd/{}", file.as_raw_fd());
        assert_eq!(path.as_c_str().to_str(), Ok(&*expected));
        assert_eq!(path.join(b"x"), format!("{expected}/x").as_bytes());
    }
}
