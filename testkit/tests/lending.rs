//! Buffers that lend their memory, through every frontend.

mod ways;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use defuse_fs::{
    Caps, Context, Errno, File, FileSystem, ReadArgs, ReadBuf, Result, SliceSink, SliceSource,
    WriteArgs, WriteBuf, delegate,
};
use defuse_memory::{Memory, Options};

/// A file system that reads and writes only in memory that it was lent, as a device would.
struct Device {
    inner: Memory,
    submits: bool,
    /// Addresses of the memory that the last read and the last write were lent.
    read_at: AtomicUsize,
    written_from: AtomicUsize,
}

impl Device {
    fn new(submits: bool) -> Arc<Self> {
        let inner = Memory::new(Options::default());
        let (read_at, written_from) = Default::default();
        Arc::new(Device { inner, submits, read_at, written_from })
    }
}

impl FileSystem for Device {
    delegate!(to inner, except caps, read, write, submit);

    fn caps(&self) -> Caps {
        Caps { submits: self.submits, ..self.inner.caps() }
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        let mut done = 0;
        while let Some(room) = out.lend() {
            self.read_at.store(room.as_ptr() as usize, Ordering::SeqCst);
            let len = room.len();
            let mut sink = SliceSink::new(room);
            let mut part = ReadBuf::new(&mut sink, len);
            let args = ReadArgs { offset: args.offset + done, ..args };
            FileSystem::read(&self.inner, cx, file, args, &mut part)?;
            let count = part.filled();
            out.advance(count)?;
            done += count as u64;
            if count < len {
                return Ok(());
            }
        }
        if out.remaining() > 0 { Err(Errno::EOPNOTSUPP) } else { Ok(()) }
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let mut done = 0;
        while let Some(bytes) = data.borrow() {
            self.written_from.store(bytes.as_ptr() as usize, Ordering::SeqCst);
            let mut source = SliceSource::new(bytes);
            let args = WriteArgs { offset: args.offset + done as u64, ..args };
            let mut part = WriteBuf::new(&mut source);
            let count = FileSystem::write(&self.inner, cx, file, args, &mut part)?;
            data.skip(count)?;
            done += count;
        }
        if data.remaining() > 0 { Err(Errno::EOPNOTSUPP) } else { Ok(done) }
    }
}

#[test]
fn every_frontend_lends_its_private_memory() {
    for submits in [false, true] {
        ways::each(
            || Device::new(submits),
            |way, fs, open| {
                let file = open();
                // More than a page, and less than what the kernel mount splices.
                let bytes: Vec<u8> = (0..20_000).map(|at| (at % 251) as u8).collect();
                assert_eq!(file.pwrite(&bytes, 3), bytes.len(), "{way} {submits}");
                let mut read = vec![0; bytes.len() + 9];
                assert_eq!(file.pread(&mut read, 3), bytes.len(), "{way} {submits}");
                assert_eq!(read[..bytes.len()], bytes, "{way} {submits}");
                // In the same process, it is the memory of the caller itself.
                let lent = fs.read_at.load(Ordering::SeqCst) == read.as_ptr() as usize
                    && fs.written_from.load(Ordering::SeqCst) == bytes.as_ptr() as usize;
                assert_eq!(lent, way == "direct" && !submits, "{way} {submits}");
            },
        );
    }
}
