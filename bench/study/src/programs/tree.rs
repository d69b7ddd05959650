//! The files that the programs use: made once as an archive, and unpacked on every target.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::{ProgramsScale, script};

/// Files in one directory.
const IN_DIRECTORY: usize = 50;

/// The directory of a measurement. Dropping it removes everything.
pub struct ProgramsDirectory(PathBuf);

impl ProgramsDirectory {
    /// A new directory in `work`.
    pub fn new(work: &Path) -> Result<ProgramsDirectory> {
        let path = work.join(format!("defuse-bench-run-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| {
            format!("cannot make {}: name another directory with --work", path.display())
        })?;
        let place = ProgramsDirectory(path);
        fs::create_dir(place.mountpoint())?;
        Ok(place)
    }

    /// The target of mounts.
    pub fn mountpoint(&self) -> PathBuf {
        self.0.join("mounted")
    }

    /// The archive of the tree.
    pub fn archive(&self) -> PathBuf {
        self.0.join("tree.tar")
    }

    /// The script that runs the programs.
    pub fn script(&self) -> PathBuf {
        self.0.join("programs.sh")
    }

    /// A directory for the counts of system calls.
    pub fn counts_path(&self) -> PathBuf {
        self.0.join("counts")
    }

    /// An empty directory for the tree.
    pub fn make_empty(&self) -> Result<PathBuf> {
        for name in ["lower", "counts"] {
            let path = self.0.join(name);
            if path.exists() {
                fs::remove_dir_all(&path)?;
            }
            fs::create_dir(&path)?;
        }
        Ok(self.0.join("lower"))
    }
}

impl Drop for ProgramsDirectory {
    fn drop(&mut self) {
        // Remaining files can be removed by hand.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Makes the script, and the archive of the tree with a repository of git.
pub fn prepare(place: &ProgramsDirectory, scale: &ProgramsScale) -> Result<()> {
    fs::write(place.script(), script::TEXT)?;
    let top = place.0.join("tree");
    for number in 0..scale.files {
        let half = if number % 2 == 0 { "a" } else { "b" };
        let dir = top.join(half).join(format!("d{}", number / (2 * IN_DIRECTORY)));
        if number % (2 * IN_DIRECTORY) < 2 {
            fs::create_dir_all(&dir)?;
        }
        fs::write(dir.join(format!("file-{number}.txt")), text(number))?;
    }
    fs::create_dir_all(top.join("modules"))?;
    let mut imports = String::new();
    for number in 0..scale.modules {
        let body = format!("VALUE = {number}\n\ndef value():\n    return VALUE\n");
        fs::write(top.join(format!("modules/module_{number}.py")), body)?;
        imports += &format!("import module_{number}\n");
    }
    fs::write(top.join("modules/all_of_them.py"), imports)?;
    fs::create_dir_all(top.join("build"))?;
    let objects: Vec<_> = (0..scale.sources).map(|number| format!("s{number}.o")).collect();
    for number in 0..scale.sources {
        let body = format!("int f{number}(int x) {{ return x + {number}; }}\n");
        fs::write(top.join(format!("build/s{number}.c")), body)?;
    }
    let rules = format!("all: {}\n%.o: %.c\n\tcc -c -o $@ $<\n", objects.join(" "));
    fs::write(top.join("build/Makefile"), rules)?;
    let commands = "git init -q . && git add . && git -c user.name=bench -c user.email=bench@localhost \
                    commit -q -m tree && tar cf ../tree.tar .";
    let mut make = Command::new("sh");
    make.args(["-c", commands]).current_dir(&top).stdin(Stdio::null());
    let output = make.output().context("sh could not be started")?;
    let why = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the tree could not be made: {why}");
    fs::remove_dir_all(&top)?;
    Ok(())
}

/// Between 100 bytes and 2 KiB, different in each file.
fn text(number: usize) -> String {
    format!("line {number} of a small file\n").repeat(5 + number * 7 % 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_differ_and_are_small() {
        let texts: Vec<_> = (0..200).map(text).collect();
        assert!(texts.iter().all(|text| (100..2500).contains(&text.len())));
        assert!(texts.iter().enumerate().all(|(at, text)| !texts[..at].contains(text)));
    }
}
