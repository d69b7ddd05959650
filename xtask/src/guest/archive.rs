//! The initial file system of the guest: an archive in the format "newc" of cpio(5).

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::command;

/// The type bits of a mode.
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;

/// An archive that grows.
#[derive(Default)]
pub struct CpioArchive {
    bytes: Vec<u8>,
    serial: u32,
    directories: BTreeSet<PathBuf>,
    files: BTreeSet<PathBuf>,
}

impl CpioArchive {
    /// Adds a file at the absolute path `to`, with the directories above it.
    pub fn file(&mut self, to: &str, content: &[u8], permissions: u32) -> Result<()> {
        let to = Path::new(to);
        ensure!(to.is_absolute(), "{}: an absolute path", to.display());
        if !self.files.insert(to.to_owned()) {
            return Ok(());
        }
        self.directory(to.parent().unwrap_or(to))?;
        self.entry(to, REGULAR | permissions, content)
    }

    /// Adds a program under the name `to`, and the libraries that it loads under their own.
    pub fn program(&mut self, from: &Path, to: &str) -> Result<()> {
        self.copy(from, to)?;
        for library in libraries(from)? {
            self.copy(Path::new(&library), &library)?;
        }
        Ok(())
    }

    /// The whole archive.
    pub fn finish(mut self) -> Result<Vec<u8>> {
        self.entry(Path::new("/TRAILER!!!"), 0, &[])?;
        Ok(self.bytes)
    }

    fn copy(&mut self, from: &Path, to: &str) -> Result<()> {
        let content = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        self.file(to, &content, 0o755)
    }

    fn directory(&mut self, path: &Path) -> Result<()> {
        if path == Path::new("/") || !self.directories.insert(path.to_owned()) {
            return Ok(());
        }
        self.directory(path.parent().unwrap_or(Path::new("/")))?;
        self.entry(path, DIRECTORY | 0o755, &[])
    }

    fn entry(&mut self, path: &Path, mode: u32, content: &[u8]) -> Result<()> {
        let name = path.strip_prefix("/")?.to_str().context("a name in UTF-8")?;
        self.serial += 1;
        let (links, len) = (1, u32::try_from(content.len())?);
        let name_len = u32::try_from(name.len())? + 1;
        let fields = [self.serial, mode, 0, 0, links, 0, len, 0, 0, 0, 0, name_len, 0];
        self.bytes.extend(b"070701");
        fields.iter().for_each(|field| self.bytes.extend(format!("{field:08x}").bytes()));
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
        Ok(())
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// The paths of the libraries of a program, with the path of the dynamic linker.
fn libraries(program: &Path) -> Result<Vec<String>> {
    let said = command::output(Command::new("ldd").arg(program).env("LC_ALL", "C"));
    match said {
        Ok(said) => Ok(paths(&said)),
        // ldd(1) calls that a failure.
        Err(error) if format!("{error:#}").contains("not a dynamic executable") => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// The paths in the output of ldd(1).
fn paths(said: &str) -> Vec<String> {
    let words = said.lines().flat_map(str::split_whitespace);
    words.filter(|word| word.starts_with('/')).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_each_directory_once_and_before_its_files() {
        let mut archive = CpioArchive::default();
        archive.file("/a/b/one", b"1", 0o644).unwrap();
        archive.file("/a/b/two", b"22", 0o755).unwrap();
        archive.file("/a/b/two", b"again", 0o755).unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        let names: Vec<&str> = text.split("070701").skip(1).map(name).collect();
        assert_eq!(names, ["a", "a/b", "a/b/one", "a/b/two", "TRAILER!!!"]);
        let header = text.find("a/b/two").unwrap() - 110;
        assert_eq!(&text[header..header + 22], "07070100000004000081ed", "number and mode");
    }

    fn name(entry: &str) -> &str {
        entry[104..].split('\0').next().unwrap()
    }

    #[test]
    fn libraries_are_the_paths_that_ldd_prints() {
        let said =
            "\tlinux-vdso.so.1 (0x1)\n\tlibc.so.6 => /lib/libc.so.6 (0x2)\n\t/lib64/ld.so (0x3)\n";
        assert_eq!(paths(said), ["/lib/libc.so.6", "/lib64/ld.so"]);
    }
}
