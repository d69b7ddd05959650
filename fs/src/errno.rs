//! Error numbers, errno(3).

use std::fmt;
use std::io;

/// The result of every operation of the contract.
pub type Result<T, E = Errno> = std::result::Result<T, E>;

/// An error number of Linux, errno(3). Never 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(i32);

macro_rules! errnos {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        impl Errno {
            $(#[doc = concat!($text, ".")] pub const $name: Errno = Errno($number);)*

            /// The symbolic name, such as `ENOENT`; `None` for other numbers.
            pub fn name(self) -> Option<&'static str> {
                match self.0 { $($number => Some(stringify!($name)),)* _ => None }
            }

            fn text(self) -> &'static str {
                match self.0 { $($number => $text,)* _ => "Unknown error" }
            }
        }
    };
}

errnos! {
    EPERM = 1, "Operation not permitted";
    ENOENT = 2, "No such file or directory";
    ESRCH = 3, "No such process";
    EINTR = 4, "Interrupted system call";
    EIO = 5, "Input/output error";
    ENXIO = 6, "No such device or address";
    E2BIG = 7, "Argument list too long";
    EBADF = 9, "Bad file descriptor";
    EAGAIN = 11, "Resource temporarily unavailable";
    ENOMEM = 12, "Cannot allocate memory";
    EACCES = 13, "Permission denied";
    EFAULT = 14, "Bad address";
    EBUSY = 16, "Device or resource busy";
    EEXIST = 17, "File exists";
    EXDEV = 18, "Invalid cross-device link";
    ENODEV = 19, "No such device";
    ENOTDIR = 20, "Not a directory";
    EISDIR = 21, "Is a directory";
    EINVAL = 22, "Invalid argument";
    ENFILE = 23, "Too many open files in system";
    EMFILE = 24, "Too many open files";
    ENOTTY = 25, "Inappropriate ioctl for device";
    ETXTBSY = 26, "Text file busy";
    EFBIG = 27, "File too large";
    ENOSPC = 28, "No space left on device";
    ESPIPE = 29, "Illegal seek";
    EROFS = 30, "Read-only file system";
    EMLINK = 31, "Too many links";
    EPIPE = 32, "Broken pipe";
    ERANGE = 34, "Numerical result out of range";
    EDEADLK = 35, "Resource deadlock avoided";
    ENAMETOOLONG = 36, "File name too long";
    ENOLCK = 37, "No locks available";
    ENOSYS = 38, "Function not implemented";
    ENOTEMPTY = 39, "Directory not empty";
    ELOOP = 40, "Too many levels of symbolic links";
    ENODATA = 61, "No data available";
    EPROTO = 71, "Protocol error";
    EOVERFLOW = 75, "Value too large for defined data type";
    EOPNOTSUPP = 95, "Operation not supported";
    ECONNABORTED = 103, "Software caused connection abort";
    ECONNRESET = 104, "Connection reset by peer";
    ENOTCONN = 107, "Transport endpoint is not connected";
    ETIMEDOUT = 110, "Connection timed out";
    ECONNREFUSED = 111, "Connection refused";
    EINPROGRESS = 115, "Operation now in progress";
    ESTALE = 116, "Stale file handle";
    EDQUOT = 122, "Disk quota exceeded";
    ECANCELED = 125, "Operation canceled";
}

impl Errno {
    /// `ENOATTR` of attr(5) is `ENODATA` on Linux.
    pub const ENOATTR: Errno = Errno::ENODATA;

    /// The errno `number`. Returns `EIO` for a number that a system call cannot return (outside 1
    /// to 4095), so that no error is mistaken for success.
    pub const fn from_raw(number: i32) -> Self {
        if number >= 1 && number <= 4095 { Errno(number) } else { Errno::EIO }
    }

    /// The number, always positive.
    pub const fn raw(self) -> i32 {
        self.0
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{} ({name})", self.text()),
            None => write!(f, "{} {}", self.text(), self.0),
        }
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "Errno({})", self.0),
        }
    }
}

impl std::error::Error for Errno {}

impl From<io::Error> for Errno {
    /// The number that the system call returned. An error created by std becomes the nearest
    /// number.
    fn from(error: io::Error) -> Self {
        if let Some(number) = error.raw_os_error() {
            return Errno::from_raw(number);
        }
        match error.kind() {
            io::ErrorKind::NotFound => Errno::ENOENT,
            io::ErrorKind::PermissionDenied => Errno::EACCES,
            io::ErrorKind::AlreadyExists => Errno::EEXIST,
            io::ErrorKind::InvalidInput => Errno::EINVAL,
            io::ErrorKind::Interrupted => Errno::EINTR,
            io::ErrorKind::WouldBlock => Errno::EAGAIN,
            io::ErrorKind::OutOfMemory => Errno::ENOMEM,
            io::ErrorKind::TimedOut => Errno::ETIMEDOUT,
            io::ErrorKind::Unsupported => Errno::EOPNOTSUPP,
            _ => Errno::EIO,
        }
    }
}

impl From<Errno> for io::Error {
    fn from(errno: Errno) -> Self {
        io::Error::from_raw_os_error(errno.raw())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_agree_with_the_c_library() {
        for number in 1..200 {
            let errno = Errno::from_raw(number);
            if errno.name().is_some() {
                let text = io::Error::from_raw_os_error(number).to_string();
                assert!(text.starts_with(errno.text()), "{number}: {text} / {errno}");
            }
        }
    }

    #[test]
    fn no_errno_means_success() {
        for number in [0, -1, -2, 4096, i32::MIN, i32::MAX] {
            assert_eq!(Errno::from_raw(number), Errno::EIO);
        }
    }
}
