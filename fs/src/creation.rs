//! A file that is created with its contents.

use crate::{
    Context, Entry, Errno, File, FileSystem, Ino, LockOwner, Name, NewNode, OpenArgs, OpenFlags,
    ReleaseArgs, Result, SliceSource, WriteArgs, WriteBuf,
};

/// How [`Shortcuts::create_with`](crate::Shortcuts::create_with) opens a file.
pub const CREATE_WITH: OpenArgs = OpenArgs {
    flags: OpenFlags(OpenFlags::WRONLY | OpenFlags::CREAT | OpenFlags::EXCL),
    kill_suidgid: false,
};

/// Creates a file with the contents `data` by calls of `create`, `write`, `flush` and `release`.
/// Fails with the errors of [`Shortcuts::create_with`](crate::Shortcuts::create_with).
pub fn create_in_calls<F: FileSystem + ?Sized>(
    fs: &F,
    cx: &Context<'_>,
    (parent, name): (Ino, Name<'_>),
    node: &NewNode<'_>,
    data: &[u8],
) -> Result<Entry> {
    let (entry, opened) = fs.create(cx, parent, name, node, CREATE_WITH)?;
    let file = File { ino: entry.ino, fh: opened.fh };
    let written = fill_new(fs, cx, (file, opened.no_flush), data, 0);
    let _ = fs.release(cx, file, ReleaseArgs::from_flags(CREATE_WITH.flags));
    written.inspect_err(|_| fs.forget(entry.ino, 1))?;
    Ok(entry)
}

/// Writes the bytes of `data` after the first `done` bytes to a new file, and flushes the file,
/// unless `no_flush` is set ([`OpenReply::no_flush`](crate::OpenReply::no_flush)).
///
/// # Errors
///
/// Fails with the errors of `write` and `flush`; `EIO` for a write of nothing.
pub fn fill_new<F: FileSystem + ?Sized>(
    fs: &F,
    cx: &Context<'_>,
    (file, no_flush): (File, bool),
    data: &[u8],
    mut done: usize,
) -> Result<()> {
    while done < data.len() {
        let flags = CREATE_WITH.flags;
        let args = WriteArgs { offset: done as u64, flags, ..WriteArgs::default() };
        let mut source = SliceSource::new(&data[done..]);
        match fs.write(cx, file, args, &mut WriteBuf::new(&mut source))? {
            0 => return Err(Errno::EIO),
            count => done += count,
        }
    }
    if no_flush {
        return Ok(());
    }
    match fs.flush(cx, file, LockOwner(0)) {
        Err(Errno::ENOSYS) => Ok(()),
        flushed => flushed,
    }
}
