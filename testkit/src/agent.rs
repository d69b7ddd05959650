//! Operations on files as words, and their answers as words, so that a process on another mount or
//! in a run can carry them out: `stat /x/file` is answered by `12 f 644 5 1`.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{self, BufRead, Write};
use std::os::unix::fs::{
    DirBuilderExt, DirEntryExt, FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt,
    symlink,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::posix::sys::{self, FcntlLockType, LockCommand};

/// Open files by the names that the caller gave them.
#[derive(Debug, Default)]
pub struct FileAgent {
    held: Mutex<HashMap<String, Arc<File>>>,
}

impl FileAgent {
    /// Carries out an operation.
    ///
    /// # Errors
    ///
    /// The errors of the operation, and `InvalidInput` for words that are none.
    pub fn run(&self, words: &[&str]) -> io::Result<String> {
        match words {
            ["stat", path] => Ok(format_attributes(&fs::symlink_metadata(path)?)),
            ["list", path] => list(path),
            ["readlink", path] => Ok(fs::read_link(path)?.display().to_string()),
            ["read", path] => data(&File::open(path)?),
            ["create", path, len, seed] => {
                let mut new = OpenOptions::new();
                write_at(new.write(true).create_new(true).mode(0o600).open(path)?, "0", len, seed)
            }
            ["overwrite", path, len, seed] => {
                let mut old = OpenOptions::new();
                write_at(old.write(true).truncate(true).open(path)?, "0", len, seed)
            }
            ["write", path, offset, len, seed] => {
                write_at(OpenOptions::new().write(true).open(path)?, offset, len, seed)
            }
            ["append", path, len, seed] => {
                let mut file = OpenOptions::new().append(true).open(path)?;
                file.write_all(&content(number(seed)?, number(len)? as usize))?;
                inode(&file)
            }
            ["truncate", path, size] => {
                let file = OpenOptions::new().write(true).open(path)?;
                file.set_len(number(size)?)?;
                inode(&file)
            }
            ["chmod", path, mode] => {
                let mode =
                    u32::from_str_radix(mode, 8).map_err(|_| unknown_operation_error(mode))?;
                format_result(fs::set_permissions(path, Permissions::from_mode(mode)))
            }
            ["unlink", path] => format_result(fs::remove_file(path)),
            ["rmdir", path] => format_result(fs::remove_dir(path)),
            ["rename", from, to] => format_result(fs::rename(from, to)),
            ["link", from, to] => format_result(fs::hard_link(from, to)),
            ["symlink", text, path] => format_result(symlink(text, path)),
            ["mkdir", path] => format_result(DirBuilder::new().mode(0o700).create(path)),
            ["hold", id, path] => {
                let file = File::open(path)?;
                let inode = inode(&file)?;
                self.lock_files().insert((*id).to_owned(), Arc::new(file));
                Ok(inode)
            }
            ["lock", id, path] => {
                let file = OpenOptions::new().read(true).write(true).open(path)?;
                // By the C library, because a run does not replace system calls of programs that
                // are executed later.
                sys::lock(&file, LockCommand::Set, FcntlLockType::Write, 0, 0)?;
                let inode = inode(&file)?;
                self.lock_files().insert((*id).to_owned(), Arc::new(file));
                Ok(inode)
            }
            ["held", id] => data(&*self.find(id)?),
            ["release", id] => format_result(
                self.lock_files().remove(*id).map(drop).ok_or_else(missing_file_error),
            ),
            _ => Err(unknown_operation_error(&words.join(" "))),
        }
    }

    /// Answers lines of words, `ok` with the answer or `error` with the number, until there are no
    /// more.
    ///
    /// # Errors
    ///
    /// The errors of reading and writing the lines.
    pub fn serve(&self, lines: impl BufRead, mut answers: impl Write) -> io::Result<()> {
        for line in lines.lines() {
            let line = line?;
            let words: Vec<&str> = line.split(' ').collect();
            match self.run(&words) {
                Ok(answer) => writeln!(answers, "ok {answer}")?,
                Err(error) => writeln!(answers, "error {}", errno(&error))?,
            }
            answers.flush()?;
        }
        Ok(())
    }

    fn find(&self, id: &str) -> io::Result<Arc<File>> {
        self.lock_files().get(id).cloned().ok_or_else(missing_file_error)
    }

    fn lock_files(&self) -> MutexGuard<'_, HashMap<String, Arc<File>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The number of an error; 0 for one that is not of the system.
pub fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(0)
}

/// Bytes that follow from a seed.
pub fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// A number for the bytes (FNV-1a), in which any change of them shows.
pub fn sum(bytes: &[u8]) -> u64 {
    let add = |sum: u64, &byte: &u8| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, add)
}

fn write_at(file: File, offset: &str, len: &str, seed: &str) -> io::Result<String> {
    let bytes = content(number(seed)?, number(len)? as usize);
    file.write_all_at(&bytes, number(offset)?)?;
    inode(&file)
}

fn inode(file: &File) -> io::Result<String> {
    Ok(file.metadata()?.ino().to_string())
}

/// Inode, kind, mode, size and number of names.
fn format_attributes(found: &Metadata) -> String {
    let (mode, kind) = (found.mode() & 0o7777, kind_letter(found.file_type()));
    format!("{} {kind} {mode:o} {} {}", found.ino(), found.size(), found.nlink())
}

/// Inode, length and sum of the bytes of an open file, from its start to its end.
fn data(file: &File) -> io::Result<String> {
    let mut bytes = Vec::new();
    let mut room = [0; 1 << 16];
    loop {
        let len = file.read_at(&mut room, bytes.len() as u64)?;
        if len == 0 {
            return Ok(format!("{} {} {:x}", inode(file)?, bytes.len(), sum(&bytes)));
        }
        bytes.extend_from_slice(&room[..len]);
    }
}

/// Each name with its inode and kind.
fn list(path: &str) -> io::Result<String> {
    let entry = |entry: io::Result<fs::DirEntry>| {
        let entry = entry?;
        let kind = kind_letter(entry.file_type()?);
        Ok(format!("{}:{}:{kind}", entry.file_name().display(), entry.ino()))
    };
    let entries: io::Result<Vec<String>> = fs::read_dir(path)?.map(entry).collect();
    Ok(entries?.join(" "))
}

fn kind_letter(kind: fs::FileType) -> char {
    match kind {
        kind if kind.is_file() => 'f',
        kind if kind.is_dir() => 'd',
        kind if kind.is_symlink() => 'l',
        kind if kind.is_fifo() => 'p',
        _ => '?',
    }
}

fn format_result(done: io::Result<()>) -> io::Result<String> {
    done.map(|()| String::new())
}

fn number(word: &str) -> io::Result<u64> {
    word.parse().map_err(|_| unknown_operation_error(word))
}

fn unknown_operation_error(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{text:?} is no operation"))
}

fn missing_file_error() -> io::Error {
    io::Error::from_raw_os_error(libc::EBADF)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_lines_of_words_and_so_are_their_answers() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().display();
        let lines = format!(
            "mkdir {dir}/d\ncreate {dir}/d/f 5 1\nlink {dir}/d/f {dir}/g\nhold 1 {dir}/g\nunlink {dir}/g\n\
             append {dir}/d/f 2 7\nheld 1\nstat {dir}/d/g\nnothing x\nrelease 1\nheld 1\nlist {dir}/d\n\
             stat {dir}/d/f\n"
        );
        let mut answers = Vec::new();
        FileAgent::default().serve(lines.as_bytes(), &mut answers).unwrap();
        let text = String::from_utf8(answers).unwrap();
        let answers: Vec<&str> = text.lines().collect();
        let inode = answers[1].strip_prefix("ok ").unwrap();
        let bytes = [content(1, 5), content(7, 2)].concat();
        assert_eq!(answers[6], format!("ok {inode} 7 {:x}", sum(&bytes)));
        assert_eq!(answers[7..9], ["error 2", "error 0"]);
        assert_eq!(answers[9..11], ["ok ", "error 9"]);
        assert_eq!(answers[11], format!("ok f:{inode}:f"));
        assert_eq!(answers[12], format!("ok {inode} f 600 7 1"));
    }
}
