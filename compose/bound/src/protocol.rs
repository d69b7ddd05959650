//! The messages between an application and the manager of the device that it binds.
//!
//! A message is one packet of a `SOCK_SEQPACKET` socket: words with a NUL between them, up to 4
//! KiB. One message has a descriptor beside it. Both sides check what they receive, and end the
//! connection where it makes no sense.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use defuse_fs::{Errno, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// The beginning of the first message. No INIT begins so: it would have the length 0x75666564.
pub const FIRST: &[u8] = b"defuse-bind\x001\0";
/// The longest message.
const LONGEST: usize = 4096;

/// A message of an application.
#[derive(Debug)]
pub enum ApplicationMessage {
    /// The first one: gives the device at this path of the manager's tree.
    Take(String),
    /// The first one of an application that has the device open, after another manager ended or
    /// gave it up.
    Keep(String),
    /// The device is open, and its file system is served on the socket that came with the grant.
    Serving,
    /// It is alive.
    Pong,
    /// It gives the device back: nothing may be in progress.
    Return,
}

/// A message of a manager.
#[derive(Debug)]
pub enum ManagerMessage {
    /// The manager does not have the device open.
    Granted {
        /// The source.
        source: String,
        /// Its options.
        options: Vec<String>,
        /// The socket on which the application serves. The manager makes it, so that no application
        /// has the other end.
        socket: OwnedFd,
    },
    /// The application does not get the device.
    Refused {
        /// The error number.
        errno: Errno,
        /// The object and the next step.
        why: String,
    },
    /// Requests of others come.
    Served,
    /// A request to show that the application is alive.
    Ping,
    /// Nothing is in progress any more, and everything is durable.
    Quiet,
}

/// The end of a connection between the two.
#[derive(Debug)]
pub struct ManagerChannel<S>(S);

impl<S: AsFd> ManagerChannel<S> {
    /// The connection by `socket`.
    pub fn new(socket: S) -> Self {
        ManagerChannel(socket)
    }

    /// Sends a message of an application.
    ///
    /// # Errors
    ///
    /// Fails with the errors of sendmsg(2); `EAGAIN` where the other side does not receive.
    pub fn send_request(&self, ask: &ApplicationMessage) -> Result<()> {
        let first =
            |word: &str, device: &str| [FIRST, word.as_bytes(), b"\0", device.as_bytes()].concat();
        match ask {
            ApplicationMessage::Take(device) => self.send(&first("take", device), None),
            ApplicationMessage::Keep(device) => self.send(&first("keep", device), None),
            ApplicationMessage::Serving => self.send(b"serving", None),
            ApplicationMessage::Pong => self.send(b"pong", None),
            ApplicationMessage::Return => self.send(b"return", None),
        }
    }

    /// Sends a message of a manager.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`send_request`](ManagerChannel::send_request).
    pub fn answer(&self, answer: &ManagerMessage) -> Result<()> {
        let message = match answer {
            ManagerMessage::Granted { source, options, socket } => {
                let words = ["granted", source].into_iter().chain(options.iter().map(|o| &**o));
                return self.send(words.collect::<Vec<_>>().join("\0").as_bytes(), Some(socket));
            }
            ManagerMessage::Refused { errno, why } => {
                let mut why = why.clone();
                while why.len() > LONGEST / 2 {
                    why.pop();
                }
                format!("refused\0{}\0{why}", errno.raw())
            }
            ManagerMessage::Served => "served".to_owned(),
            ManagerMessage::Ping => "ping".to_owned(),
            ManagerMessage::Quiet => "quiet".to_owned(),
        };
        self.send(message.as_bytes(), None)
    }

    /// Waits for a message of an application. `None` after `patience`.
    ///
    /// # Errors
    ///
    /// `ECONNRESET` after the end of the connection, `EPROTO` for a message that is none, and
    /// errors of recvmsg(2).
    pub fn next_ask(&self, patience: Duration) -> Result<Option<ApplicationMessage>> {
        let Some((message, _)) = self.receive(patience)? else { return Ok(None) };
        decode_request(&message).map(Some).ok_or(Errno::EPROTO)
    }

    /// Waits for a message of a manager. `None` after `patience`.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`next_ask`](ManagerChannel::next_ask).
    pub fn next_answer(&self, patience: Duration) -> Result<Option<ManagerMessage>> {
        let Some((message, fd)) = self.receive(patience)? else { return Ok(None) };
        decode_reply(&message, fd).map(Some).ok_or(Errno::EPROTO)
    }

    fn send(&self, message: &[u8], fd: Option<&OwnedFd>) -> Result<()> {
        if message.len() > LONGEST {
            return Err(Errno::ENAMETOOLONG);
        }
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut room);
        let fds = fd.map(|fd| [fd.as_fd()]);
        if let Some(fds) = &fds {
            beside.push(SendAncillaryMessage::ScmRights(fds));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let parts = [IoSlice::new(message)];
        rustix::net::sendmsg(&self.0, &parts, &mut beside, flags).map(drop).map_err(errno)
    }

    fn receive(&self, patience: Duration) -> Result<Option<(Vec<u8>, Option<OwnedFd>)>> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let wait =
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
            match poll(&mut fds, Some(&wait)) {
                Ok(0) => return Ok(None),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(errno(error)),
            }
            let mut message = vec![0; LONGEST + 1];
            let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut beside = RecvAncillaryBuffer::new(&mut room);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let received = {
                let mut parts = [IoSliceMut::new(&mut message)];
                rustix::net::recvmsg(&self.0, &mut parts, &mut beside, flags)
            };
            let fds = beside.drain().filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            });
            let fd = fds.flatten().last();
            match received.map(|received| received.bytes) {
                Ok(0) => return Err(Errno::ECONNRESET),
                Ok(len) if len > LONGEST => return Err(Errno::EPROTO),
                Ok(len) => {
                    message.truncate(len);
                    return Ok(Some((message, fd)));
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(errno(error)),
            }
        }
    }
}

fn decode_request(message: &[u8]) -> Option<ApplicationMessage> {
    if let Some(rest) = message.strip_prefix(FIRST) {
        let (word, device) = std::str::from_utf8(rest).ok()?.split_once('\0')?;
        let device = (!device.contains('\0')).then(|| device.to_owned())?;
        return match word {
            "take" => Some(ApplicationMessage::Take(device)),
            "keep" => Some(ApplicationMessage::Keep(device)),
            _ => None,
        };
    }
    match message {
        b"serving" => Some(ApplicationMessage::Serving),
        b"pong" => Some(ApplicationMessage::Pong),
        b"return" => Some(ApplicationMessage::Return),
        _ => None,
    }
}

fn decode_reply(message: &[u8], fd: Option<OwnedFd>) -> Option<ManagerMessage> {
    let mut words = std::str::from_utf8(message).ok()?.split('\0');
    let answer = match words.next()? {
        "granted" => {
            let (source, options) = (words.next()?.to_owned(), words.by_ref());
            let options = options.map(str::to_owned).collect();
            ManagerMessage::Granted { source, options, socket: fd? }
        }
        "refused" => {
            let errno = words.next()?.parse().ok().filter(|errno| (1..4096).contains(errno))?;
            ManagerMessage::Refused { errno: Errno::from_raw(errno), why: words.next()?.to_owned() }
        }
        "served" => ManagerMessage::Served,
        "ping" => ManagerMessage::Ping,
        "quiet" => ManagerMessage::Quiet,
        _ => return None,
    };
    words.next().is_none().then_some(answer)
}

/// The error of a system call in the contract's type.
pub(crate) fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (ManagerChannel<OwnedFd>, ManagerChannel<OwnedFd>) {
        let flags = SocketFlags::CLOEXEC;
        let (one, other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (ManagerChannel::new(one), ManagerChannel::new(other))
    }

    const SOON: Duration = Duration::from_millis(1);

    #[test]
    fn each_message_arrives_as_it_was_sent() {
        let (application, manager) = pair();
        for ask in [
            ApplicationMessage::Take("/fast".to_owned()),
            ApplicationMessage::Keep("/a b".to_owned()),
            ApplicationMessage::Serving,
            ApplicationMessage::Pong,
            ApplicationMessage::Return,
        ] {
            application.send_request(&ask).unwrap();
            let got = manager.next_ask(SOON).unwrap().unwrap();
            assert_eq!(format!("{ask:?}"), format!("{got:?}"));
        }
        for options in [vec!["cache=1M".to_owned(), "commit=0".to_owned()], Vec::new()] {
            let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
            let (source, sent) = ("uhs:/i".to_owned(), options.clone());
            manager
                .answer(&ManagerMessage::Granted { source, options, socket: one.into() })
                .unwrap();
            let Ok(Some(ManagerMessage::Granted { source, options, socket })) =
                application.next_answer(SOON)
            else {
                panic!()
            };
            assert_eq!((source.as_str(), options), ("uhs:/i", sent));
            // The descriptor refers to the socket.
            rustix::io::write(&other, b"x").unwrap();
            assert_eq!(rustix::io::read(&socket, &mut [0; 8]), Ok(1));
        }
        for answer in [
            ManagerMessage::Refused { errno: Errno::EBUSY, why: "somebody".to_owned() },
            ManagerMessage::Served,
            ManagerMessage::Ping,
            ManagerMessage::Quiet,
        ] {
            manager.answer(&answer).unwrap();
            let got = application.next_answer(SOON).unwrap().unwrap();
            assert_eq!(format!("{answer:?}"), format!("{got:?}"));
        }
        assert!(matches!(application.next_answer(SOON), Ok(None)));
        drop(manager);
        assert!(matches!(application.next_answer(SOON), Err(Errno::ECONNRESET)));
    }

    #[test]
    fn what_is_no_message_is_an_error_and_no_message_is_longer_than_its_limit() {
        let (application, manager) = pair();
        let first = |rest: &[u8]| [FIRST, rest].concat();
        for wrong in [
            // A grant has a socket.
            b"granted\0uhs:/i".to_vec(),
            b"pongs".to_vec(),
            b"\0".to_vec(),
            first(b"take"),
            first(b"give\0/fast"),
            first(b"take\0/fast\0/slow"),
            first(b"take\0\xff"),
            b"defuse-bind\x002\0take\0/fast".to_vec(),
            vec![b'a'; LONGEST],
        ] {
            application.send(&wrong, None).unwrap();
            assert_eq!(manager.next_ask(SOON).map(drop), Err(Errno::EPROTO), "{wrong:?}");
            manager.send(&wrong, None).unwrap();
            let got = application.next_answer(SOON);
            assert!(matches!(got, Err(Errno::EPROTO)), "{wrong:?}: {got:?}");
        }
        for wrong in ["refused\x000\0why", "refused\0-1\0why", "refused\x0016", "ping\0"] {
            manager.send(wrong.as_bytes(), None).unwrap();
            let got = application.next_answer(SOON);
            assert!(matches!(got, Err(Errno::EPROTO)), "{wrong:?}: {got:?}");
        }
        let long = vec![b'a'; LONGEST + 1];
        assert_eq!(application.send(&long, None), Err(Errno::ENAMETOOLONG));
        let why = "\u{e4}".repeat(LONGEST);
        manager.answer(&ManagerMessage::Refused { errno: Errno::EIO, why: why.clone() }).unwrap();
        let Ok(Some(ManagerMessage::Refused { why: cut, .. })) = application.next_answer(SOON)
        else {
            panic!()
        };
        assert!(why.starts_with(&cut) && cut.len() == LONGEST / 2);
    }
}
