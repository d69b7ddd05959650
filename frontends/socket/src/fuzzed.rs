//! Several clients of several users on one server, for the fuzzer: sequences of valid requests, and
//! a model that decides after each request what its user may have seen and changed.
//!
//! The model does not know the rules by which the server decides. It looks at the file system, as
//! root, before and after each request, and judges the difference.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use defuse_fs::{
    AccessMode, Attr, Caller, Context, Errno, Fh, File, FileKind, FileSystem, Ino, Name, OpenFlags,
    ReadArgs, ReadBuf, Result, SliceSink,
};
use zerocopy::FromBytes;

use defuse_connection::{
    ConnectionLimits, InheritedInode, PeerConnection, PeerCredentials, ServiceQuotas, ServiceState,
};

use defuse_session::{ClientHooks, Handler, RequestAnswer, SharedMemory};

use crate::peer::FusePeer;
use defuse_wire::abi::{self, Opcode};
use defuse_wire::request::{DecodedRequest, RequestBody, RequestExtensions, RequestPayload};

const READ: u32 = 4;
const WRITE: u32 = 2;
const EXEC: u32 = 1;
const SPECIAL: u32 = 0o6000;
/// Users with their groups. The first two are root.
const USERS: [(u32, &[u32]); 4] = [(0, &[0]), (0, &[0]), (1000, &[1000, 20]), (1001, &[1001])];
const NAMES: [&[u8]; 6] = [b"a", b"b", b"c", b"d", b"e", b"f"];
const PERMS: [u32; 10] = [0o600, 0o644, 0o666, 0o755, 0o777, 0o1777, 0o4755, 0o6777, 0o711, 0o2755];
/// The number of bytes of every file that are compared.
const LOOK: usize = 64 * 1024;
/// Most connections at once.
const MOST: usize = 8;

/// Carries out the requests of `script` on `fs`.
///
/// # Panics
///
/// If a user other than root has read, changed, made or removed something without the right to do
/// so.
pub fn peers(fs: Arc<dyn FileSystem>, script: &[u8]) {
    let mut world = World::new(fs);
    let mut bytes = Script(script);
    world.begin();
    while let Some(step) = bytes.next() {
        world.step(step, &mut bytes);
    }
    world.end();
}

struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// The rest of a script that has ended is zeros.
    fn number_below(&mut self, limit: usize) -> usize {
        usize::from(self.next().unwrap_or(0)) % limit.max(1)
    }

    fn choose_one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.number_below(all.len())]
    }
}

/// A connection, with the objects that it got.
struct Player {
    peer: Arc<FusePeer>,
    handler: Handler,
    inodes: Vec<Ino>,
    open: Vec<Opened>,
}

#[derive(Clone, Copy)]
struct Opened {
    file: File,
    reads: bool,
    writes: bool,
}

struct World {
    fs: Arc<dyn FileSystem>,
    service: Arc<ServiceState>,
    players: Vec<Player>,
    /// All inodes that any client got.
    inodes: HashSet<Ino>,
    /// Files that a client can write through a mapping, at any time.
    stored: HashSet<Ino>,
    unique: u64,
}

/// The visible state of an inode.
#[derive(Clone, PartialEq)]
struct Seen {
    attr: Attr,
    bytes: Vec<u8>,
}

impl World {
    fn new(fs: Arc<dyn FileSystem>) -> World {
        let connection = ConnectionLimits { mapped_bytes: 1 << 20, ..ConnectionLimits::default() };
        let user = ConnectionLimits { mapped_bytes: 3 << 20, ..ConnectionLimits::default() };
        let quotas = ServiceQuotas { connection, user, mapped_bytes: 5 << 20 };
        let mut world = World {
            fs,
            service: ServiceState::new(quotas, || ()),
            players: Vec::new(),
            inodes: HashSet::from([Ino::ROOT]),
            stored: HashSet::new(),
            unique: 2,
        };
        for (uid, groups) in USERS {
            let credentials = PeerCredentials { pid: 1, uid, groups: groups.to_vec() };
            let (fs, service) = (Arc::clone(&world.fs), Arc::clone(&world.service));
            let connection = PeerConnection::new(fs, service, credentials);
            world.join(connection, Vec::new(), Vec::new());
        }
        world
    }

    fn join(
        &mut self,
        connection: PeerConnection<Arc<dyn FileSystem>>,
        inodes: Vec<Ino>,
        open: Vec<Opened>,
    ) {
        let peer = Arc::new(FusePeer { connection, pages: None, versions: None });
        let memory = Some(Arc::clone(&peer) as Arc<dyn SharedMemory>);
        let handler = Handler::new(
            Arc::clone(&peer) as Arc<dyn FileSystem>,
            ClientHooks { memory, ..ClientHooks::default() },
        );
        let inodes = if inodes.is_empty() { vec![Ino::ROOT] } else { inodes };
        self.players.push(Player { peer, handler, inodes, open });
    }

    /// Root makes a directory for all, one for itself, and files of several kinds.
    fn begin(&mut self) {
        for (name, perm) in [(0, 0o1777), (1, 0o700), (2, 0o777), (3, 0o744)] {
            let _ = self.request(
                0,
                Ino::ROOT,
                RequestBody::Mkdir {
                    args: abi::MkdirIn { mode: perm, umask: 0 },
                    name: NAMES[name],
                    ext: RequestExtensions::default(),
                },
            );
        }
        let made = self.players[0].inodes.clone();
        for (at, &dir) in made.iter().enumerate() {
            for (name, perm) in [(4, 0o600), (5, 0o6777)] {
                let answer = self.request(0, dir, create(NAMES[name], perm));
                let file = self.players[0].open.last().map(|open| open.file);
                if let (Ok(_), Some(File { ino, fh })) = (answer, file) {
                    let secret = format!("of root {at} {name}").into_bytes();
                    let _ = self.request(0, ino, write(fh, 0, &secret));
                }
            }
        }
    }

    fn end(&mut self) {
        for player in std::mem::take(&mut self.players) {
            Self::end_player(&player);
        }
        assert!(self.service.maps_nothing(), "a mapping is left behind");
    }

    fn end_player(player: &Player) {
        player.peer.connection.audit();
        player.peer.connection.close();
    }

    fn step(&mut self, step: u8, script: &mut Script<'_>) {
        let who = script.number_below(self.players.len());
        match step % 32 {
            30 => return self.fork(who, script),
            31 if self.players.len() > USERS.len() => {
                let player = self.players.remove(who.max(USERS.len()));
                return Self::end_player(&player);
            }
            _ => {}
        }
        let player = &self.players[who];
        let ino = player.inodes[script.number_below(player.inodes.len())];
        let other = player.inodes[script.number_below(player.inodes.len())];
        let open = match player.open.len() {
            0 => Opened { file: File { ino, fh: Fh(1) }, reads: false, writes: false },
            count => player.open[script.number_below(count)],
        };
        let (name, newname) = (script.choose_one_of(&NAMES), script.choose_one_of(&NAMES));
        let perm = script.choose_one_of(&PERMS);
        let flags =
            script.choose_one_of(&[0, 1, 2, OpenFlags::TRUNC, 2 | OpenFlags::TRUNC, 0o1000000]);
        let offset = script.number_below(4) as u64 * 2048;
        let (fh, used) = (open.file.fh, open.file.ino);
        let ext = RequestExtensions::default();
        let kinds = [0o100000, 0o010000, 0o020000, 0o060000, 0o140000];
        let text = [b'0' + script.number_below(10) as u8; 300];
        let xattr = script.choose_one_of(&[
            &b"user.x"[..],
            b"trusted.x",
            b"security.capability",
            b"system.posix_acl_access",
        ]);
        let (ino, body) = match step % 32 {
            0..=3 => (ino, RequestBody::Lookup { name }),
            4 | 5 => (ino, RequestBody::Open(abi::OpenIn { flags, open_flags: 0 })),
            6 => (ino, create(name, perm)),
            7 => {
                (ino, RequestBody::Mkdir { args: abi::MkdirIn { mode: perm, umask: 0 }, name, ext })
            }
            8 => {
                let mode = perm | script.choose_one_of(&kinds);
                let args = abi::MknodIn { mode, rdev: 0x103, ..abi::MknodIn::default() };
                (ino, RequestBody::Mknod { args, name, ext })
            }
            9 => (ino, RequestBody::Symlink { name, target: b"a", ext }),
            10 => (ino, RequestBody::Link { args: abi::LinkIn { oldnodeid: other.0 }, name }),
            11 => (ino, RequestBody::Unlink { name }),
            12 => (ino, RequestBody::Rmdir { name }),
            13 => {
                let flags = script.choose_one_of(&[0, 1, 2, 4]);
                let args = abi::Rename2In { newdir: other.0, flags, padding: 0 };
                (ino, RequestBody::Rename2 { args, name, newname })
            }
            14 | 15 => (ino, self.setattr(who, script, perm, fh)),
            16 | 17 => {
                let args = abi::ReadIn { fh: fh.0, offset, size: 4096, ..Default::default() };
                (used, RequestBody::Read(args))
            }
            18 | 19 => (used, write(fh, offset, &text)),
            20 => {
                let mode = script.choose_one_of(&[0, 1, 3, 8, 16, 32]);
                let (offset, length) = (offset / 4096 * 4096, 4096);
                let args = abi::FallocateIn { fh: fh.0, offset, length, mode, padding: 0 };
                (used, RequestBody::Fallocate(args))
            }
            21 => {
                let to = player
                    .open
                    .get(script.number_below(player.open.len()))
                    .copied()
                    .unwrap_or(open);
                let args = abi::CopyFileRangeIn {
                    fh_in: fh.0,
                    off_in: 0,
                    nodeid_out: to.file.ino.0,
                    fh_out: to.file.fh.0,
                    off_out: offset,
                    len: 100,
                    flags: 0,
                };
                (used, RequestBody::CopyFileRange(args))
            }
            22 => (ino, RequestBody::Opendir(abi::OpenIn::default())),
            23 => {
                let args = abi::ReadIn { fh: fh.0, size: 4096, ..Default::default() };
                (used, RequestBody::Readdirplus(args))
            }
            24 => {
                let args = abi::SetxattrIn { size: 1, ..Default::default() };
                (ino, RequestBody::Setxattr { args, name: xattr, value: b"x" })
            }
            25 => (
                ino,
                RequestBody::Getxattr {
                    args: abi::GetxattrIn { size: 64, padding: 0 },
                    name: xattr,
                },
            ),
            26 => {
                let args = abi::ReleaseIn { fh: fh.0, ..Default::default() };
                self.players[who].open.retain(|open| open.file.fh != fh);
                (used, RequestBody::Release(args))
            }
            27 | 28 => {
                let write = abi::FUSE_SETUPMAPPING_FLAG_WRITE * (script.number_below(2) as u64);
                let flags = abi::FUSE_SETUPMAPPING_FLAG_READ | write;
                let (foffset, len) = (0, 16384);
                let args = abi::SetupmappingIn { fh: fh.0, foffset, len, flags, moffset: 0 };
                (used, RequestBody::Setupmapping(args))
            }
            _ => {
                let lock = abi::FileLock {
                    start: 0,
                    end: 9,
                    type_: script.number_below(3) as u32,
                    pid: 1,
                };
                let args = abi::LkIn {
                    fh: fh.0,
                    owner: script.number_below(3) as u64,
                    lk: lock,
                    lk_flags: script.number_below(2) as u32,
                    padding: 0,
                };
                (used, RequestBody::Setlk(args))
            }
        };
        let _ = self.request(who, ino, body);
    }

    fn setattr(
        &self,
        who: usize,
        script: &mut Script<'_>,
        perm: u32,
        fh: Fh,
    ) -> RequestBody<'static> {
        let fields = [
            abi::FATTR_MODE,
            abi::FATTR_UID,
            abi::FATTR_GID,
            abi::FATTR_SIZE,
            abi::FATTR_MTIME,
            abi::FATTR_ATIME | abi::FATTR_ATIME_NOW,
            abi::FATTR_SIZE | abi::FATTR_FH,
            abi::FATTR_UID | abi::FATTR_GID,
            abi::FATTR_SIZE | abi::FATTR_MODE,
        ];
        let own = self.players[who].peer.connection.credentials().uid;
        let (uid, gid) = (
            script.choose_one_of(&[own, 0, 1000, 1001]),
            script.choose_one_of(&[own, 0, 20, 1001]),
        );
        let size = script.number_below(5) as u64 * 3000;
        let valid = script.choose_one_of(&fields);
        let args =
            abi::SetattrIn { valid, fh: fh.0, size, mode: perm, uid, gid, ..Default::default() };
        RequestBody::Setattr(args)
    }

    /// Creates a connection for a child, or for the next program, which belongs to the same user or
    /// to another one.
    fn fork(&mut self, who: usize, script: &mut Script<'_>) {
        if self.players.len() >= MOST {
            return;
        }
        let player = &self.players[who];
        let open = player.open.clone();
        if script.number_below(2) == 0 {
            let (copy, inodes) = (player.peer.connection.copy(), player.inodes.clone());
            return match copy {
                Ok(copy) => self.join(copy, inodes, open),
                Err(errno) => assert_eq!(errno, Errno::ENOMEM, "the other limits are far"),
            };
        }
        let (uid, groups) = script.choose_one_of(&USERS[2..]);
        let credentials = PeerCredentials { pid: 1, uid, groups: groups.to_vec() };
        let successor = player.peer.connection.prepare_exec(credentials);
        let mut taken = (vec![Ino::ROOT], Vec::new());
        for file in open {
            let mode =
                script.choose_one_of(&[AccessMode::Read, AccessMode::Write, AccessMode::ReadWrite]);
            let (ino, fh) = (file.file.ino, Some(file.file.fh));
            if successor.take_over(&InheritedInode { ino, fh, mode, process_locks: false }).is_ok()
            {
                taken.0.push(ino);
                let reads = file.reads && mode != AccessMode::Write;
                let writes = file.writes && mode != AccessMode::Read;
                taken.1.push(Opened { reads, writes, ..file });
            }
        }
        successor.settle();
        self.join(successor, taken.0, taken.1);
    }

    /// Makes a request, and judges its outcome.
    fn request(&mut self, who: usize, ino: Ino, body: RequestBody<'_>) -> Result<()> {
        let before = self.list_inodes();
        let victim = match body {
            RequestBody::Unlink { name } | RequestBody::Rmdir { name } => self.look_up(ino, name),
            RequestBody::Rename2 { name, .. } => self.look_up(ino, name),
            _ => None,
        };
        self.unique += 2;
        let credentials = self.players[who].peer.connection.credentials().clone();
        let (uid, gid) = (credentials.uid, credentials.groups[0]);
        let request = DecodedRequest {
            unique: self.unique,
            opcode: opcode(&body),
            nodeid: ino.0,
            uid,
            gid,
            pid: 1,
            caller_groups: None,
            body,
        };
        let reply = self.players[who].handler.handle(&request);
        if let Some(errno) = reply.errno.filter(|&errno| errno != 0) {
            self.judge_change(&credentials, &self.players[who].open, &before, &body);
            return Err(Errno::from_raw(errno));
        }
        self.note(who, ino, &body, &reply);
        if uid != 0 {
            let user = User { who: &credentials, open: &self.players[who].open };
            user.judge_success(ino, &body, &reply, &before, victim.as_ref());
            self.judge_change(&credentials, &self.players[who].open, &before, &body);
        }
        Ok(())
    }

    /// The attributes of a name, looked up by root.
    fn look_up(&self, dir: Ino, name: &[u8]) -> Option<Attr> {
        let cx = root();
        let found = self.fs.lookup(&cx, dir, Name::new(name).ok()?).ok()?;
        self.fs.forget(found.ino, 1);
        Some(found.attr)
    }

    /// All inodes as root sees them.
    fn list_inodes(&self) -> BTreeMap<u64, Seen> {
        let seen = |&ino: &Ino| {
            let cx = root();
            let attr = self.fs.getattr(&cx, ino, None).ok()?;
            let mut bytes = Vec::new();
            if attr.kind == FileKind::Regular && !self.stored.contains(&ino) {
                bytes.resize(LOOK.min(attr.size as usize), 0);
                let len = bytes.len();
                let mut sink = SliceSink::new(&mut bytes);
                let mut out = ReadBuf::new(&mut sink, len);
                let file = File { ino, fh: Fh(0) };
                let args = ReadArgs { flags: OpenFlags(OpenFlags::NOATIME), ..ReadArgs::default() };
                let _ = self.fs.read(&cx, file, args, &mut out);
            }
            Some((ino.0, Seen { attr, bytes }))
        };
        self.inodes.iter().filter_map(seen).collect()
    }

    /// Records the inodes and open files in a reply to the client.
    fn note(&mut self, who: usize, ino: Ino, body: &RequestBody<'_>, reply: &RequestAnswer) {
        let mut granted = Vec::new();
        let player = &mut self.players[who];
        let mut opened = |ino, fh, flags: u32| {
            let flags = OpenFlags(flags);
            let file = File { ino, fh: Fh(fh) };
            player.open.push(Opened { file, reads: flags.readable(), writes: flags.writable() });
        };
        match body {
            RequestBody::Lookup { .. }
            | RequestBody::Mknod { .. }
            | RequestBody::Mkdir { .. }
            | RequestBody::Symlink { .. }
            | RequestBody::Link { .. } => granted.push(entry(&reply.bytes)),
            RequestBody::Create { args, .. } => {
                let made = entry(&reply.bytes);
                let (out, _) =
                    abi::OpenOut::read_from_prefix(&reply.bytes[size_of::<abi::EntryOut>()..])
                        .expect("CREATE answers with an open file");
                opened(Ino(made.nodeid), out.fh, args.flags);
                granted.push(made);
            }
            RequestBody::Open(args) => {
                let (out, _) = abi::OpenOut::read_from_prefix(&reply.bytes).expect("an open file");
                opened(ino, out.fh, args.flags);
            }
            RequestBody::Opendir(_) => {
                let (out, _) = abi::OpenOut::read_from_prefix(&reply.bytes).expect("a directory");
                opened(ino, out.fh, 0);
            }
            RequestBody::Readdirplus(_) => granted.extend(decode_listed(&reply.bytes)),
            RequestBody::Setupmapping(args) => {
                let writes = args.flags & abi::FUSE_SETUPMAPPING_FLAG_WRITE != 0;
                let memory = reply.fd.as_ref().expect("a mapping has memory");
                let stored = rustix::io::pwrite(memory, b"stored", 100).is_ok();
                assert_eq!(stored, writes, "whoever may only read has memory to write");
                assert!(rustix::fs::ftruncate(memory, 0).is_err(), "memory is made shorter");
                if writes {
                    self.stored.insert(ino);
                }
            }
            _ => {}
        }
        for entry in granted.into_iter().filter(|entry| entry.nodeid != 0) {
            self.inodes.insert(Ino(entry.nodeid));
            self.players[who].inodes.push(Ino(entry.nodeid));
        }
    }

    /// Checks that nothing has changed, except data that the user may change.
    fn judge_change(
        &self,
        who: &PeerCredentials,
        open: &[Opened],
        before: &BTreeMap<u64, Seen>,
        body: &RequestBody<'_>,
    ) {
        if who.uid == 0 {
            return;
        }
        let user = User { who, open };
        for (ino, after) in self.list_inodes() {
            let Some(before) = before.get(&ino) else { continue };
            let what = format!("user {} by {:?} on inode {ino}", who.uid, opcode(body));
            let (old, new) = (&before.attr, &after.attr);
            let own = old.uid == who.uid;
            assert_eq!(old.uid, new.uid, "{what}: the owner");
            if old.gid != new.gid {
                assert!(own && who.groups.contains(&new.gid), "{what}: the group");
            }
            let same = (old.size, &before.bytes) == (new.size, &after.bytes);
            let writes = open.iter().any(|open| open.file.ino.0 == ino && open.writes);
            let is_regular = old.kind == FileKind::Regular && !self.stored.contains(&Ino(ino));
            if is_regular && !same {
                assert!(writes || user.may(old, WRITE), "{what}: the bytes");
                let kept = new.perm & (0o4000 | if new.perm & 0o010 != 0 { 0o2000 } else { 0 });
                assert!(own || kept == 0, "{what}: mode {:o} is kept", new.perm);
            }
            if old.perm != new.perm && !own {
                let cleared =
                    old.perm & !SPECIAL == new.perm & !SPECIAL && new.perm & !old.perm == 0;
                assert!(cleared && (writes || user.may(old, WRITE)), "{what}: {:o}", new.perm);
            }
        }
    }
}

/// The user of a client, and its open files.
struct User<'a> {
    who: &'a PeerCredentials,
    open: &'a [Opened],
}

impl User<'_> {
    fn may(&self, attr: &Attr, mask: u32) -> bool {
        let bits = if attr.uid == self.who.uid {
            attr.perm >> 6
        } else if self.who.groups.contains(&attr.gid) {
            attr.perm >> 3
        } else {
            attr.perm
        };
        bits & mask == mask
    }

    /// Judges whether the request that has succeeded was permitted.
    fn judge_success(
        &self,
        ino: Ino,
        body: &RequestBody<'_>,
        reply: &RequestAnswer,
        before: &BTreeMap<u64, Seen>,
        victim: Option<&Attr>,
    ) {
        let what = format!("user {}: {:?} of inode {}", self.who.uid, opcode(body), ino.0);
        let attr = |ino: Ino| &before[&ino.0].attr;
        let has = |fh: u64, how: fn(&Opened) -> bool| {
            self.open.iter().any(|open| open.file == File { ino, fh: Fh(fh) } && how(open))
        };
        let removes = |dir: &Attr| {
            let free = dir.perm & 0o1000 == 0 || dir.uid == self.who.uid;
            self.may(dir, WRITE | EXEC)
                && (free || victim.is_none_or(|victim| victim.uid == self.who.uid))
        };
        let made = || {
            let entry = entry(&reply.bytes);
            let kind = entry.attr.mode & 0o170000;
            entry.attr.uid == self.who.uid && kind != 0o020000 && kind != 0o060000
        };
        let permitted = match body {
            RequestBody::Lookup { .. } => self.may(attr(ino), EXEC),
            RequestBody::Open(args) => {
                let flags = OpenFlags(args.flags);
                let mut mask = if flags.readable() { READ } else { 0 };
                mask |= if flags.writable() || flags.has(OpenFlags::TRUNC) { WRITE } else { 0 };
                self.may(attr(ino), mask)
            }
            RequestBody::Opendir(_) => self.may(attr(ino), READ),
            RequestBody::Create { .. }
            | RequestBody::Mknod { .. }
            | RequestBody::Mkdir { .. }
            | RequestBody::Symlink { .. } => self.may(attr(ino), WRITE | EXEC) && made(),
            RequestBody::Link { args, .. } => {
                let old = attr(Ino(args.oldnodeid));
                let special = old.perm & 0o4000 != 0 || old.perm & 0o2010 == 0o2010;
                let plain = old.kind == FileKind::Regular && !special;
                let accessible = plain && self.may(old, READ | WRITE);
                self.may(attr(ino), WRITE | EXEC) && (old.uid == self.who.uid || accessible)
            }
            RequestBody::Unlink { .. } | RequestBody::Rmdir { .. } => removes(attr(ino)),
            RequestBody::Rename2 { args, .. } => {
                args.flags & 4 == 0
                    && removes(attr(ino))
                    && self.may(attr(Ino(args.newdir)), WRITE | EXEC)
            }
            RequestBody::Read(args) => has(args.fh, |open| open.reads),
            RequestBody::Write { args, .. } => has(args.fh, |open| open.writes),
            RequestBody::Readdirplus(_) => {
                self.may(attr(ino), EXEC)
                    || decode_listed(&reply.bytes).iter().all(|one| one.nodeid == 0)
            }
            RequestBody::Setxattr { name, .. } => {
                name.starts_with(b"user.") && self.may(attr(ino), WRITE)
            }
            RequestBody::Getxattr { name, .. } => !name.starts_with(b"trusted."),
            _ => true,
        };
        assert!(permitted, "{what} with mode {:o} of {}", attr(ino).perm, attr(ino).uid);
    }
}

fn root() -> Context<'static> {
    Context::new(Caller::default())
}

fn entry(bytes: &[u8]) -> abi::EntryOut {
    abi::EntryOut::read_from_prefix(bytes).expect("the answer is an entry").0
}

fn decode_listed(mut bytes: &[u8]) -> Vec<abi::EntryOut> {
    let mut entries = Vec::new();
    while let Ok((item, _)) = abi::Direntplus::read_from_prefix(bytes) {
        entries.push(item.entry_out);
        let len = size_of::<abi::Direntplus>() + item.dirent.namelen as usize;
        bytes = bytes.get(abi::rec_align(len)..).unwrap_or_default();
    }
    entries
}

fn create(name: &[u8], mode: u32) -> RequestBody<'_> {
    let flags = OpenFlags::RDWR | OpenFlags::CREAT | OpenFlags::EXCL;
    let args = abi::CreateIn { flags, mode: mode | 0o100000, umask: 0, open_flags: 0 };
    RequestBody::Create { args, name, ext: RequestExtensions::default() }
}

fn write(fh: Fh, offset: u64, bytes: &[u8]) -> RequestBody<'_> {
    let args =
        abi::WriteIn { fh: fh.0, offset, size: bytes.len() as u32, flags: 2, ..Default::default() };
    RequestBody::Write { args, data: RequestPayload::Memory(bytes) }
}

fn opcode(body: &RequestBody<'_>) -> Opcode {
    match body {
        RequestBody::Lookup { .. } => Opcode::Lookup,
        RequestBody::Open(_) => Opcode::Open,
        RequestBody::Create { .. } => Opcode::Create,
        RequestBody::Mkdir { .. } => Opcode::Mkdir,
        RequestBody::Mknod { .. } => Opcode::Mknod,
        RequestBody::Symlink { .. } => Opcode::Symlink,
        RequestBody::Link { .. } => Opcode::Link,
        RequestBody::Unlink { .. } => Opcode::Unlink,
        RequestBody::Rmdir { .. } => Opcode::Rmdir,
        RequestBody::Rename2 { .. } => Opcode::Rename2,
        RequestBody::Setattr(_) => Opcode::Setattr,
        RequestBody::Read(_) => Opcode::Read,
        RequestBody::Write { .. } => Opcode::Write,
        RequestBody::Fallocate(_) => Opcode::Fallocate,
        RequestBody::CopyFileRange(_) => Opcode::CopyFileRange,
        RequestBody::Opendir(_) => Opcode::Opendir,
        RequestBody::Readdirplus(_) => Opcode::Readdirplus,
        RequestBody::Setxattr { .. } => Opcode::Setxattr,
        RequestBody::Getxattr { .. } => Opcode::Getxattr,
        RequestBody::Release(_) => Opcode::Release,
        RequestBody::Setupmapping(_) => Opcode::Setupmapping,
        RequestBody::Setlk(_) => Opcode::Setlk,
        other => unreachable!("{other:?} is never asked for"),
    }
}
