//! The descriptor through which requests come and replies go.

use std::ffi::{c_int, c_void};
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, Weak};

use defuse_fuse::abi::FUSE_DEV_IOC_CLONE;
use rustix::fs::{Mode, OFlags};

use super::abi::{ChannelFunctions, CustomIo};
use crate::handle::lock;

/// A descriptor of /dev/fuse, or one for which the program has functions.
pub struct LowPort {
    /// The descriptor, if it ends with the port.
    owned: Option<OwnedFd>,
    number: RawFd,
    way: PortWay,
    /// Further descriptors of the same connection.
    clones: Mutex<Vec<Weak<LowPort>>>,
}

enum PortWay {
    /// System calls.
    Device,
    /// A socket to a process in the place of the kernel.
    Connection,
    /// Functions of `fuse_session_custom_io`, with the data of the program.
    Custom(CustomIo, *mut c_void),
    /// Functions of `fuse_chan_new`, with the channel.
    Channel(ChannelFunctions, AtomicPtr<c_void>),
}

// SAFETY: the pointers are the program's, which lets any thread receive and reply; they are only
// passed back to its functions.
unsafe impl Send for LowPort {}
// SAFETY: as above; nothing is changed but the atomic pointer.
unsafe impl Sync for LowPort {}

/// The number of the last error of the C library.
fn last_error() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

impl LowPort {
    /// A port to /dev/fuse.
    pub fn device(fd: OwnedFd) -> Arc<LowPort> {
        let number = fd.as_raw_fd();
        Arc::new(LowPort {
            owned: Some(fd),
            number,
            way: PortWay::Device,
            clones: Mutex::default(),
        })
    }

    /// A port to the process at the other end of a socket, in messages.
    pub fn connection(fd: OwnedFd) -> Arc<LowPort> {
        let number = fd.as_raw_fd();
        let (way, clones) = (PortWay::Connection, Mutex::default());
        Arc::new(LowPort { owned: Some(fd), number, way, clones })
    }

    /// A port through functions of the program, which gives the descriptor away.
    ///
    /// # Safety
    ///
    /// `fd` is an open descriptor that nothing else closes. The functions can be called from any
    /// thread with `data`.
    pub unsafe fn custom(fd: RawFd, io: CustomIo, data: *mut c_void) -> Arc<LowPort> {
        // SAFETY: the caller's promise.
        let owned = unsafe { OwnedFd::from_raw_fd(fd) };
        let (way, clones) = (PortWay::Custom(io, data), Mutex::default());
        Arc::new(LowPort { owned: Some(owned), number: fd, way, clones })
    }

    /// A port through the functions of a channel, which closes its descriptor by itself.
    ///
    /// # Safety
    ///
    /// The functions can be called from any thread with the channel of
    /// [`set_channel`](LowPort::set_channel).
    pub unsafe fn channel(fd: RawFd, functions: ChannelFunctions) -> Arc<LowPort> {
        let way = PortWay::Channel(functions, AtomicPtr::default());
        Arc::new(LowPort { owned: None, number: fd, way, clones: Mutex::default() })
    }

    /// Sets the pointer that the functions of a channel get.
    pub fn set_channel(&self, pointer: *mut c_void) {
        if let PortWay::Channel(_, channel) = &self.way {
            channel.store(pointer, Ordering::SeqCst);
        }
    }

    /// The number of the descriptor.
    pub fn number(&self) -> RawFd {
        self.number
    }

    /// The descriptor, unless a channel of the program has it.
    pub(crate) fn borrow_device(&self) -> Option<BorrowedFd<'_>> {
        self.owned.as_ref().map(AsFd::as_fd)
    }

    /// Receives one message. Returns its length, or an error number.
    pub fn receive(&self, room: &mut [u8]) -> Result<usize, c_int> {
        let (to, len) = (room.as_mut_ptr(), room.len());
        // SAFETY: the room has `len` bytes. The functions are those of the program for this purpose
        // (`custom`, `channel`).
        let got = unsafe {
            match &self.way {
                PortWay::Device => libc::read(self.number, to.cast(), len),
                PortWay::Connection => match libc::recv(self.number, to.cast(), len, 0) {
                    // The other end has not read everything.
                    -1 if last_error() == libc::ECONNRESET => return Ok(0),
                    got => got,
                },
                PortWay::Custom(io, data) => match io.read {
                    Some(read) => read(self.number, to.cast(), len, *data),
                    None => return Err(libc::ENOSYS),
                },
                PortWay::Channel(functions, channel) => {
                    let Some(receive) = functions.receive else { return Err(libc::ENOSYS) };
                    let mut channel = channel.load(Ordering::SeqCst);
                    let got = receive(&mut channel, to.cast(), len);
                    return usize::try_from(got)
                        .map_err(|_| got.saturating_neg())
                        .map(|got| got.min(len));
                }
            }
        };
        usize::try_from(got).map_err(|_| last_error()).map(|got| got.min(len))
    }

    /// Sends one message. Returns an error number.
    pub fn send(&self, parts: &[IoSlice<'_>]) -> Result<(), c_int> {
        // `IoSlice` has the layout of `struct iovec`.
        let (list, count) = (parts.as_ptr().cast::<libc::iovec>(), parts.len());
        // SAFETY: the list has `count` parts, which live here. The functions are the program's, see
        // `receive`.
        let sent = unsafe {
            match &self.way {
                PortWay::Device => libc::writev(self.number, list, count as c_int),
                PortWay::Connection => {
                    let mut message: libc::msghdr = std::mem::zeroed();
                    (message.msg_iov, message.msg_iovlen) = (list.cast_mut(), count);
                    // The end of the other process is an error and no signal.
                    libc::sendmsg(self.number, &message, libc::MSG_NOSIGNAL)
                }
                PortWay::Custom(io, data) => match io.writev {
                    Some(writev) => writev(self.number, list, count as c_int, *data),
                    None => return Err(libc::ENOSYS),
                },
                PortWay::Channel(functions, channel) => {
                    let Some(send) = functions.send else { return Err(libc::ENOSYS) };
                    let code = send(channel.load(Ordering::SeqCst), list, count);
                    return if code < 0 { Err(code.saturating_neg()) } else { Ok(()) };
                }
            }
        };
        if sent < 0 { Err(last_error()) } else { Ok(()) }
    }

    /// Another descriptor of the same connection, for a thread of its own.
    pub fn clone_device(&self) -> Option<Arc<LowPort>> {
        let PortWay::Device = self.way else { return None };
        let clone =
            rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let original = self.number;
        // SAFETY: for this request number the kernel reads one 32-bit number, which `original` is.
        let code = unsafe {
            libc::ioctl(clone.as_raw_fd(), libc::c_ulong::from(FUSE_DEV_IOC_CLONE), &original)
        };
        let clone = (code == 0).then(|| LowPort::device(clone))?;
        let mut clones = lock(&self.clones);
        clones.retain(|earlier| earlier.strong_count() > 0);
        clones.push(Arc::downgrade(&clone));
        Some(clone)
    }

    /// True if the file system behind a device was unmounted.
    pub fn is_dead(&self) -> bool {
        let PortWay::Device = self.way else { return false };
        let mut waited = libc::pollfd { fd: self.number, events: 0, revents: 0 };
        // SAFETY: one structure, which lives here; the call does not wait.
        unsafe { libc::poll(&mut waited, 1, 0) == 1 && waited.revents & libc::POLLERR != 0 }
    }

    /// Closes the file, and its clones. The numbers stay in use until no request has them any more,
    /// so that a late reply reaches no other file.
    pub fn close(&self) {
        let clones = std::mem::take(&mut *lock(&self.clones));
        clones.iter().filter_map(Weak::upgrade).for_each(|clone| clone.close());
        if self.owned.is_none() {
            return;
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        if let Ok(null) = rustix::fs::open("/dev/null", flags, Mode::empty()) {
            // SAFETY: both numbers are open descriptors, and this port owns the second one, which
            // stays open.
            unsafe { libc::dup3(null.as_raw_fd(), self.number, libc::O_CLOEXEC) };
        }
    }

    /// Calls the function of a channel for its end.
    pub fn end_channel(&self) {
        if let PortWay::Channel(functions, channel) = &self.way
            && let Some(destroy) = functions.destroy
        {
            // SAFETY: the function is the program's for this purpose, and the channel its argument.
            unsafe { destroy(channel.load(Ordering::SeqCst)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_has_whole_messages_and_its_end_is_no_signal() {
        let (one, other) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let port = LowPort::connection(other.into());
        assert_eq!(port.send(&[IoSlice::new(b"ab"), IoSlice::new(b"c")]), Ok(()));
        let mut room = [0; 8];
        assert_eq!(one.recv(&mut room).unwrap(), 3);
        one.send(b"four").unwrap();
        assert_eq!(port.receive(&mut room), Ok(4));
        assert!(port.clone_device().is_none());
        drop(one);
        assert!(port.send(&[IoSlice::new(b"late")]).is_err());
    }

    #[test]
    fn a_closed_port_keeps_its_number_and_reaches_nothing() {
        let (one, other) = rustix::pipe::pipe().unwrap();
        let port = LowPort::device(other);
        assert_eq!(port.send(&[IoSlice::new(b"ab"), IoSlice::new(b"c")]), Ok(()));
        let mut room = [0; 8];
        assert_eq!(rustix::io::read(&one, &mut room), Ok(3));
        port.close();
        assert_eq!(port.send(&[IoSlice::new(b"late")]), Err(libc::EBADF));
        assert_eq!((port.receive(&mut room), rustix::io::read(&one, &mut room)), (Ok(0), Ok(0)));
        assert!(rustix::fs::fstat(port.owned.as_ref().unwrap()).is_ok());
    }
}
