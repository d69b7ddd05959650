//! Operations on the files of any file system.

use defuse_fs::{
    Caller, Context, Entry, File, FileKind, FileSystem, Ino, Name, NewNode, OpenArgs, OpenFlags,
    ReadArgs, ReadBuf, Result, SliceSink, SliceSource, WriteArgs, WriteBuf,
};

pub fn context() -> Context<'static> {
    Context::new(Caller { uid: 0, gid: 0, pid: 1 })
}

pub fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

/// Makes a file in the root, open for reading and writing.
pub fn create(fs: &dyn FileSystem, text: &str) -> (Entry, File) {
    let cx = context();
    let node = NewNode::new(FileKind::Regular, 0o644, cx.caller);
    let args =
        OpenArgs { flags: OpenFlags(OpenFlags::RDWR | OpenFlags::CREAT), kill_suidgid: false };
    let (entry, opened) = fs.create(&cx, Ino::ROOT, name(text), &node, args).unwrap();
    (entry, File { ino: entry.ino, fh: opened.fh })
}

pub fn write(fs: &dyn FileSystem, file: File, offset: u64, bytes: &[u8]) -> Result<usize> {
    let mut source = SliceSource::new(bytes);
    let args = WriteArgs { offset, flags: OpenFlags(OpenFlags::RDWR), ..WriteArgs::default() };
    fs.write(&context(), file, args, &mut WriteBuf::new(&mut source))
}

pub fn read(fs: &dyn FileSystem, file: File, offset: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut sink = SliceSink::new(&mut bytes);
    let mut out = ReadBuf::new(&mut sink, len);
    let args = ReadArgs { offset, flags: OpenFlags(OpenFlags::RDWR), ..ReadArgs::default() };
    fs.read(&context(), file, args, &mut out)?;
    let filled = out.filled_len();
    bytes.truncate(filled);
    Ok(bytes)
}
