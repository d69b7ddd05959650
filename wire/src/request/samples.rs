//! One request of each opcode, for tests and as seeds for fuzzing.

use crate::abi::*;
use crate::chain::{ChainLink, CompoundIn, RequestChain};
use zerocopy::IntoBytes;

/// A request in parts.
pub struct RequestSample {
    /// The operation.
    pub opcode: Opcode,
    /// The structure of the operation.
    pub op: Vec<u8>,
    /// Names and data.
    pub rest: Vec<u8>,
    /// Extensions of a creation.
    pub ext: Vec<u8>,
}

impl RequestSample {
    fn header(&self) -> InHeader {
        let len = 40 + self.op.len() + self.rest.len() + self.ext.len();
        InHeader {
            len: len as u32,
            opcode: self.opcode as u32,
            unique: 0x1234,
            nodeid: 7,
            uid: 1000,
            gid: 100,
            pid: 42,
            total_extlen: (self.ext.len() / 8) as u16,
            padding: 0,
        }
    }

    /// The contiguous request, as the device returns it.
    pub fn bytes(&self) -> Vec<u8> {
        [self.header().as_bytes(), &self.op, &self.rest, &self.ext].concat()
    }
}

fn sample(
    opcode: Opcode,
    op: &(impl IntoBytes + zerocopy::Immutable),
    rest: &[u8],
) -> RequestSample {
    RequestSample { opcode, op: op.as_bytes().to_vec(), rest: rest.to_vec(), ext: Vec::new() }
}

fn bare(opcode: Opcode, rest: &[u8]) -> RequestSample {
    RequestSample { opcode, op: Vec::new(), rest: rest.to_vec(), ext: Vec::new() }
}

/// Two security contexts of odd lengths, then one group.
fn extensions() -> Vec<u8> {
    let context = |name: &[u8], value: &[u8]| {
        let header = Secctx { size: value.len() as u32, padding: 0 };
        let mut bytes = [header.as_bytes(), name, b"\0", value].concat();
        bytes.resize(rec_align(bytes.len()), 0);
        bytes
    };
    let contexts = [context(b"security.selinux", b"a:b:c\0"), context(b"security.x", b"")].concat();
    let header = SecctxHeader { size: 8 + contexts.len() as u32, nr_secctx: 2 };
    let groups = ExtHeader { size: 16, type_: FUSE_EXT_GROUPS };
    [header.as_bytes(), &contexts, groups.as_bytes(), 1u32.as_bytes(), 27u32.as_bytes()].concat()
}

/// One request of each opcode.
pub fn samples() -> Vec<RequestSample> {
    let write = WriteIn { fh: 3, offset: 4096, size: 5, ..Default::default() };
    let setxattr = SetxattrIn { size: 3, flags: 1, setxattr_flags: 1, padding: 0 };
    let ioctl = IoctlIn { in_size: 4, out_size: 8, cmd: 9, ..Default::default() };
    let retrieved = NotifyRetrieveIn { size: 2, ..Default::default() };
    let forgets = [ForgetOne { nodeid: 5, nlookup: 1 }, ForgetOne { nodeid: 6, nlookup: 2 }];
    let mapping = RemovemappingOne { moffset: 0, len: 4096 };
    let create = CreateIn { flags: 0o102, mode: 0o100644, umask: 0o22, open_flags: 0 };
    let mut chain = RequestChain::default();
    chain.add(ChainLink::default(), &[&bare(Opcode::Lookup, b"name\0").bytes()]);
    let open = sample(Opcode::Open, &OpenIn::default(), b"").bytes();
    chain.add(ChainLink { uses: ChainLink::INODE, of: 0 }, &[&open]);
    let compound = CompoundIn { len: chain.as_bytes().len() as u32, reserved: 0 };
    let mut samples = vec![
        bare(Opcode::Lookup, b"name\0"),
        sample(Opcode::Forget, &ForgetIn { nlookup: 3 }, b""),
        sample(Opcode::Getattr, &GetattrIn { getattr_flags: 1, dummy: 0, fh: 9 }, b""),
        sample(Opcode::Setattr, &SetattrIn { valid: FATTR_SIZE, ..Default::default() }, b""),
        bare(Opcode::Readlink, b""),
        bare(Opcode::Symlink, b"name\0../target\0"),
        sample(Opcode::Mknod, &MknodIn { mode: 0o10644, ..Default::default() }, b"fifo\0"),
        sample(Opcode::Mkdir, &MkdirIn { mode: 0o755, umask: 0o22 }, b"dir\0"),
        bare(Opcode::Unlink, b"name\0"),
        bare(Opcode::Rmdir, b"name\0"),
        sample(Opcode::Rename, &RenameIn { newdir: 8 }, b"old\0new\0"),
        sample(Opcode::Link, &LinkIn { oldnodeid: 8 }, b"new\0"),
        sample(Opcode::Open, &OpenIn::default(), b""),
        sample(Opcode::Read, &ReadIn { fh: 3, size: 4096, ..Default::default() }, b""),
        sample(Opcode::Write, &write, b"hello"),
        bare(Opcode::Statfs, b""),
        sample(Opcode::Release, &ReleaseIn { fh: 3, ..Default::default() }, b""),
        sample(Opcode::Fsync, &FsyncIn { fh: 3, fsync_flags: 1, padding: 0 }, b""),
        sample(Opcode::Setxattr, &setxattr, b"user.a\0abc"),
        sample(Opcode::Getxattr, &GetxattrIn { size: 10, padding: 0 }, b"user.a\0"),
        sample(Opcode::Listxattr, &GetxattrIn { size: 0, padding: 0 }, b""),
        bare(Opcode::Removexattr, b"user.a\0"),
        sample(Opcode::Flush, &FlushIn::default(), b""),
        sample(Opcode::Init, &InitIn { major: 7, minor: 45, ..Default::default() }, b""),
        sample(Opcode::Opendir, &OpenIn::default(), b""),
        sample(Opcode::Readdir, &ReadIn::default(), b""),
        sample(Opcode::Releasedir, &ReleaseIn::default(), b""),
        sample(Opcode::Fsyncdir, &FsyncIn::default(), b""),
        sample(Opcode::Getlk, &LkIn::default(), b""),
        sample(Opcode::Setlk, &LkIn::default(), b""),
        sample(Opcode::Setlkw, &LkIn::default(), b""),
        sample(Opcode::Access, &AccessIn { mask: 4, padding: 0 }, b""),
        sample(Opcode::Create, &create, b"file\0"),
        sample(Opcode::Interrupt, &InterruptIn { unique: 2 }, b""),
        sample(Opcode::Bmap, &BmapIn::default(), b""),
        bare(Opcode::Destroy, b""),
        sample(Opcode::Ioctl, &ioctl, b"\x01\x02\x03\x04"),
        sample(Opcode::Poll, &PollIn::default(), b""),
        sample(Opcode::NotifyReply, &retrieved, b"ab"),
        sample(Opcode::BatchForget, &BatchForgetIn { count: 2, dummy: 0 }, forgets.as_bytes()),
        sample(Opcode::Fallocate, &FallocateIn::default(), b""),
        sample(Opcode::Readdirplus, &ReadIn::default(), b""),
        sample(Opcode::Rename2, &Rename2In { newdir: 1, flags: 2, padding: 0 }, b"old\0new\0"),
        sample(Opcode::Lseek, &LseekIn::default(), b""),
        sample(Opcode::CopyFileRange, &CopyFileRangeIn::default(), b""),
        sample(Opcode::Setupmapping, &SetupmappingIn::default(), b""),
        sample(Opcode::Removemapping, &RemovemappingIn { count: 1 }, mapping.as_bytes()),
        sample(Opcode::Syncfs, &SyncfsIn::default(), b""),
        sample(Opcode::Tmpfile, &create, b"/\0"),
        sample(Opcode::Statx, &StatxIn { sx_mask: 0xfff, ..Default::default() }, b""),
        sample(Opcode::CopyFileRange64, &CopyFileRangeIn::default(), b""),
        sample(Opcode::Compound, &compound, chain.as_bytes()),
        sample(Opcode::CuseInit, &CuseInitIn { major: 7, ..Default::default() }, b""),
    ];
    for s in &mut samples {
        let creates =
            [Opcode::Symlink, Opcode::Mknod, Opcode::Mkdir, Opcode::Create, Opcode::Tmpfile];
        if creates.contains(&s.opcode) {
            s.ext = extensions();
        }
    }
    samples
}
