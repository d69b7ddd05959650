//! The client without a server, for the fuzzer and for tests: any call, with any reply.

use std::os::fd::OwnedFd;
use std::time::Duration;

use defuse_fs::{
    Caller, Context, DirBuf, DirItem, DirSink, Entry, Fh, File, FileKind, FileSystem, Ino,
    IoctlArgs, Lock, LockKind, LockOwner, LockRequest, LockType, Name, NewNode, NoNotify, OpenArgs,
    OpenFlags, ReadArgs, ReadBuf, SetAttr, SliceSink, XattrName,
};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
use zerocopy::{FromBytes, IntoBytes};

use super::{RemoteClient, RemoteOptions};
use defuse_wire::abi::{self, InHeader, OutHeader};

/// Makes the call selected by `choice`, and replies to each request with the next part of `answers`
/// (after a valid header). When they are used up, replies with `EIO`.
///
/// # Panics
///
/// If the call panics, or accepts more data than it requested.
pub fn answer(choice: u8, answers: &[u8]) {
    let flags = SocketFlags::CLOEXEC;
    let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let Ok((ours, theirs)) = pair else { return };
    let script = answers.to_vec();
    let server = std::thread::spawn(move || serve(&theirs, &script));
    let options =
        RemoteOptions { timeout: Some(Duration::from_secs(5)), ..RemoteOptions::default() };
    if let Ok(client) = RemoteClient::from_socket(ours, options) {
        client.attach(defuse_fs::Origin::new(), std::sync::Arc::new(NoNotify));
        call(&client, choice);
    }
    let _ = server.join();
}

/// Answers INIT correctly, and all other requests with parts of `script`: two bytes for the length,
/// one for the error or a notification, and the rest unchanged.
fn serve(socket: &OwnedFd, mut script: &[u8]) {
    let mut room = vec![0; 1 << 18];
    while let Ok(len @ 1..) = rustix::io::read(socket, &mut room[..]) {
        let Ok((header, _)) = InHeader::read_from_prefix(&room[..len]) else { return };
        let opcode = abi::Opcode::from_u32(header.opcode);
        if !opcode.is_some_and(abi::Opcode::has_reply) {
            continue;
        }
        let init = abi::InitOut {
            major: 7,
            minor: 45,
            flags: u32::MAX,
            flags2: u32::MAX,
            max_write: 8192,
            max_pages: 2,
            ..abi::InitOut::default()
        };
        let (error, unique, body) = match (opcode, script) {
            (Some(abi::Opcode::Init), _) => (0, header.unique, init.as_bytes()),
            (_, [low, high, kind, rest @ ..]) => {
                let len = usize::from(u16::from_le_bytes([*low, *high])).min(rest.len());
                let (body, after) = rest.split_at(len);
                script = after;
                match kind {
                    0..=9 => (i32::from(*kind), 0, body),
                    10..=99 => (-i32::from(*kind), header.unique, &[][..]),
                    _ => (0, header.unique, body),
                }
            }
            _ => (-5, header.unique, &[][..]),
        };
        let answer = OutHeader { len: (16 + body.len()) as u32, error, unique };
        let message = [answer.as_bytes(), body].concat();
        if rustix::net::send(socket, &message, SendFlags::NOSIGNAL).is_err() {
            return;
        }
        if unique == 0 {
            // The request itself still needs a reply.
            let answer = OutHeader { len: 16, error: -5, unique: header.unique };
            let _ = rustix::net::send(socket, answer.as_bytes(), SendFlags::NOSIGNAL);
        }
    }
}

struct NameCounter(usize);

impl DirSink for NameCounter {
    fn wants_entries(&self) -> bool {
        true
    }
    fn fits(&self, name_len: usize) -> bool {
        name_len <= self.0
    }
    fn add(&mut self, item: DirItem<'_>, _: Option<&Entry>) {
        assert!(!item.name.is_empty() && item.next != 0);
        self.0 -= item.name.len();
    }
}

fn call(client: &RemoteClient, choice: u8) {
    let caller = Caller::default();
    let cx = &Context::new(caller);
    let (ino, file) = (Ino(2), File { ino: Ino(2), fh: Fh(3) });
    let (Ok(name), Ok(attribute)) = (Name::new(b"name"), XattrName::new(b"user.x")) else { return };
    let node = NewNode::new(FileKind::Regular, 0o644, caller);
    let args = OpenArgs::default();
    let lock = Lock { typ: LockType::Read, start: 0, end: 9, pid: 1 };
    let request = LockRequest { kind: LockKind::Posix, owner: LockOwner(1), lock, wait: false };
    match choice % 16 {
        0 => drop(client.lookup(cx, ino, name)),
        1 => drop(client.getattr(cx, ino, None)),
        2 => drop(client.setattr(cx, ino, None, &SetAttr::default())),
        3 => drop(client.create(cx, ino, name, &node, args)),
        4 => drop(client.mknod(cx, ino, name, &node)),
        5 => drop(client.readlink(cx, ino)),
        6 => drop(client.getxattr(cx, ino, attribute, 100)),
        7 => drop(client.listxattr(cx, ino, 100)),
        8 | 9 => drop(client.readdir(cx, file, 0, &mut DirBuf::new(&mut NameCounter(600)))),
        10 => {
            let mut memory = [0; 10_000];
            let mut sink = SliceSink::new(&mut memory);
            let mut out = ReadBuf::new(&mut sink, 10_000);
            let _ = client.read(cx, file, ReadArgs::default(), &mut out);
        }
        11 => {
            let args = IoctlArgs {
                cmd: 1,
                arg: 0,
                input: b"in",
                output_len: 64,
                dir: false,
                compat32: false,
            };
            if let Ok(reply) = client.ioctl(cx, file, &args) {
                assert!(reply.output.len() <= 64 && reply.result >= 0);
            }
        }
        12 => drop(client.getlk(cx, file, &request)),
        13 => drop(client.statfs(cx, ino)),
        14 => drop(client.tmpfile(cx, ino, &node, args)),
        _ => drop(client.opendir(cx, ino, OpenFlags(0))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_reply_makes_a_call_panic() {
        let mut x = 0x9e37_79b9_7f4a_7c15_u64;
        for round in 0..600_u32 {
            let mut answers = Vec::new();
            while answers.len() < 300 {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                let len = [0, 8, 16, 24, 104, 128, 144, 200][(x % 8) as usize];
                answers.extend([len as u8, 0, (x >> 8) as u8]);
                answers
                    .extend((0..len).map(|at| if x & 1 == 0 { 0 } else { (x >> (at % 56)) as u8 }));
            }
            answer(round as u8, &answers);
        }
    }

    /// One valid reply to each call, in the format of the fuzz target `answers`, with a file for
    /// each. Run as described in fuzz/README.md.
    #[test]
    #[ignore = "writes files where FUZZ_SEEDS says"]
    fn write_answer_seeds() {
        let dir = std::env::var_os("FUZZ_SEEDS").expect("FUZZ_SEEDS is set");
        let dir = std::path::PathBuf::from(dir);
        std::fs::create_dir_all(&dir).unwrap();
        let attr = abi::Attr { ino: 5, mode: 0o100_644, nlink: 1, ..abi::Attr::default() };
        let entry = abi::EntryOut { nodeid: 5, attr, ..abi::EntryOut::default() };
        let attr = abi::AttrOut { attr, ..abi::AttrOut::default() };
        let open = abi::OpenOut { fh: 3, ..abi::OpenOut::default() };
        let (entry, attr, open) = (entry.as_bytes(), attr.as_bytes(), open.as_bytes());
        let created = [entry, open].concat();
        // Inode, next position, length of the name, type, name, and padding to eight bytes.
        let words = [5_u64.to_ne_bytes(), 1_u64.to_ne_bytes()].concat();
        let name = [4_u32.to_ne_bytes(), 8_u32.to_ne_bytes()].concat();
        let listed = [&words[..], &name, b"name\0\0\0\0"].concat();
        let good: [&[u8]; 16] = [
            entry,
            attr,
            attr,
            &created,
            entry,
            b"target",
            b"value",
            b"user.x\0",
            &listed,
            &[entry, &listed].concat(),
            b"data",
            &[0; 32],
            &[0; 24],
            &[0; 80],
            &created,
            open,
        ];
        for (choice, body) in good.into_iter().enumerate() {
            let head = [choice as u8, body.len() as u8, 0, 255];
            let notified = [head[0], 40, 0, 1];
            let seed = [&head[..], body].concat();
            std::fs::write(dir.join(format!("call{choice}")), &seed).unwrap();
            // The reply after a notification.
            let seed = [&notified[..], &[0; 40], &head[1..], body].concat();
            std::fs::write(dir.join(format!("notified{choice}")), seed).unwrap();
        }
    }
}
