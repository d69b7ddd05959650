//! A process of a trace: a client of the server, which makes the calls that it reads, in turns with
//! others.
//!
//! Each line of the standard input is a turn, and each word of the line a call. The answer is a
//! line, too: the number of uses, or the reason why one failed.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use defuse_direct::{
    CallError, ClientMountArgs, ClientTask, DirectClient, FileDescription, OpenHow, WalkStart,
};
use defuse_measure::command::find_own_program;
use defuse_remote::{LaneUse, RemoteClient, RemoteOptions};
use rustix::fs::OFlags;

use super::layout::{ExtentPlace, TraceUse};
use crate::traces::EXTENT;

/// The page of an extent that is read. The policy sees groups of pages, and pages make no
/// difference to it.
const PAGE: usize = 4096;
const NAME: &[u8] = b"bench:";
/// Reads of an open file after which a client has requested its pages.
const UNTIL_PAGES: usize = 10;
/// The answer to a turn that failed begins so.
const FAILED: &str = "failed: ";

/// A turn of a process.
#[derive(Debug, Default)]
pub(super) struct ReaderTurn {
    line: String,
    uses: u64,
}

impl ReaderTurn {
    /// A file is made, with so many extents.
    pub(super) fn make(&mut self, file: u32, extents: u32) {
        let _ = write!(self.line, "make {file} {extents} ");
    }

    /// An extent is read, and its file closed if that was the last time.
    pub(super) fn read_extent(&mut self, one: TraceUse) {
        let ExtentPlace { file, slot } = one.place;
        let word = if one.is_last { "last" } else { "use" };
        let _ = write!(self.line, "{word} {file} {slot} ");
        self.uses += 1;
    }

    /// True if it has so many uses that others should be in a turn of their own.
    pub(super) fn is_long(&self) -> bool {
        self.uses >= 2000
    }

    pub(super) fn is_empty(&self) -> bool {
        self.line.is_empty()
    }
}

/// A reader in a child process, ended when dropped.
#[derive(Debug)]
pub(super) struct ReaderProcess {
    child: Child,
    turns: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl ReaderProcess {
    pub(super) fn start(socket: &Path) -> Result<ReaderProcess> {
        let mut command = Command::new(find_own_program()?);
        command.arg("bench-reader").arg(socket).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start a reader")?;
        let (turns, answers) = (child.stdin.take(), child.stdout.take());
        let answers = BufReader::new(answers.context("a reader has an output")?);
        Ok(ReaderProcess { child, turns, answers })
    }

    /// Has a turn made, and waits for its end. Returns the number of uses.
    pub(super) fn perform(&mut self, turn: &mut ReaderTurn) -> Result<u64> {
        let mut line = std::mem::take(turn).line;
        line.push('\n');
        self.turns.as_mut().context("a reader has an input")?.write_all(line.as_bytes())?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        let answer = answer.trim_end();
        if let Some(why) = answer.strip_prefix(FAILED) {
            bail!("a reader: {why}");
        }
        answer.parse().context("a reader has ended")
    }
}

impl Drop for ReaderProcess {
    fn drop(&mut self) {
        // It ends with its input.
        drop(self.turns.take());
        let _ = self.child.wait();
    }
}

/// The other side of a reader: makes the calls of the turns on the standard input until it ends.
///
/// # Errors
///
/// Fails without a server at `socket` that has memory for its clients, and if the standard output
/// is closed. Errors of calls are answers.
pub fn work(socket: &Path) -> Result<()> {
    let mut calls = ReaderClient::new(socket)?;
    let (turns, mut answers) = (std::io::stdin().lock(), std::io::stdout().lock());
    for line in turns.lines() {
        match calls.perform(&line?) {
            Ok(uses) => writeln!(answers, "{uses}")?,
            Err(error) => writeln!(answers, "{FAILED}{error:#}")?,
        }
        answers.flush()?;
    }
    Ok(())
}

/// The client, and its open files.
struct ReaderClient {
    client: DirectClient,
    task: ClientTask,
    open: HashMap<u32, Arc<FileDescription>>,
}

fn to_io_error(stop: CallError) -> std::io::Error {
    match stop {
        CallError::Errno(errno) => errno.into(),
        CallError::Outside(_) => std::io::Error::other("the path is outside of the mount"),
    }
}

/// The begin of the page that is read of an extent.
fn stamp(place: ExtentPlace) -> [u8; 8] {
    (u64::from(place.file) << 32 | u64::from(place.slot)).to_le_bytes()
}

impl ReaderClient {
    fn new(socket: &Path) -> Result<ReaderClient> {
        let options = RemoteOptions { lanes: LaneUse::Required, ..RemoteOptions::default() };
        let remote = RemoteClient::connect(socket, options)?;
        let client = DirectClient::new(defuse_direct::ClientOptions::default());
        client.mount(NAME, Arc::new(remote), &ClientMountArgs::default())?;
        Ok(ReaderClient { client, task: ClientTask::for_this_process()?, open: HashMap::new() })
    }

    fn perform(&mut self, turn: &str) -> Result<u64> {
        let (mut words, mut uses) = (turn.split_ascii_whitespace(), 0);
        while let Some(call) = words.next() {
            let mut number = || -> Result<u32> { Ok(words.next().context("a number")?.parse()?) };
            let place = ExtentPlace { file: number()?, slot: number()? };
            if call == "make" {
                self.make(place.file, place.slot)?;
                continue;
            }
            self.read(place)?;
            uses += 1;
            if call == "last"
                && let Some(file) = self.open.remove(&place.file)
            {
                file.close(&self.task)?;
            }
        }
        Ok(uses)
    }

    fn open_file(&self, file: u32, flags: OFlags) -> Result<Arc<FileDescription>> {
        let path = [NAME, format!("/{file}").as_bytes()].concat();
        let how = OpenHow { flags: flags.bits(), mode: 0o600, ..OpenHow::default() };
        Ok(self.client.open(&self.task, WalkStart::Cwd, &path, how).map_err(to_io_error)?)
    }

    /// Makes a file in which each extent has one page of data.
    fn make(&self, file: u32, extents: u32) -> Result<()> {
        let made = self.open_file(file, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)?;
        for slot in 0..extents {
            let mut page = [7; PAGE];
            page[..8].copy_from_slice(&stamp(ExtentPlace { file, slot }));
            let at = u64::from(slot) * EXTENT;
            let count = self.client.pwrite(&self.task, &made, &page, at).map_err(to_io_error)?;
            ensure!(count == PAGE, "file {file} is written in part");
        }
        let size = i64::from(extents) * EXTENT as i64;
        self.client.ftruncate(&self.task, &made, size).map_err(to_io_error)?;
        Ok(made.close(&self.task)?)
    }

    /// Reads the page of an extent as a program that has had the file open for long.
    fn read(&mut self, place: ExtentPlace) -> Result<()> {
        let ExtentPlace { file, slot } = place;
        if !self.open.contains_key(&file) {
            // Each read past the cache of uhs is one of the device.
            let opened = self.open_file(file, OFlags::RDONLY | OFlags::DIRECT)?;
            // The last page of an extent is a hole, which the device does not have.
            let hole = EXTENT - PAGE as u64;
            for _ in 0..UNTIL_PAGES {
                let mut page = [0; PAGE];
                self.client.pread(&self.task, &opened, &mut page, hole).map_err(to_io_error)?;
            }
            self.open.insert(file, opened);
        }
        let (opened, mut page) = (&self.open[&file], [0; PAGE]);
        let at = u64::from(slot) * EXTENT;
        let count = self.client.pread(&self.task, opened, &mut page, at).map_err(to_io_error)?;
        ensure!(count == PAGE && page[..8] == stamp(place), "file {file}, {slot}: other bytes");
        Ok(())
    }
}
