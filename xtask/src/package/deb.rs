//! Packages of Debian, by dpkg-deb(1): it writes equal archives of equal files, and is on every
//! Debian.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::release::ReleaseFacts;
use super::tree::{self, BuiltFiles, PackageLayout, PackagePart};
use crate::command;
use crate::library::SONAME;

/// The paths of Debian.
const LAYOUT: PackageLayout = PackageLayout {
    prefix: "/usr",
    libdir: "lib/x86_64-linux-gnu",
    library_mode: 0o644,
    compressed: true,
    doc: None,
};

const ARCHITECTURE: &str = "amd64";

/// The name of the package of a part. That of the library follows its SONAME, as Debian's policy
/// has it.
pub fn name(part: PackagePart) -> &'static str {
    match part {
        PackagePart::Program => "defuse",
        PackagePart::Study => "defuse-study",
        PackagePart::Library => "libdefuse0",
        PackagePart::Development => "libdefuse-dev",
        // The name of the module, as Debian's policy has it.
        PackagePart::Python => "python3-defuse-fs",
    }
}

/// Makes all packages in the directory `to`, by way of files in the directory `work`.
pub fn make(
    built: &BuiltFiles,
    facts: &ReleaseFacts,
    work: &Path,
    to: &Path,
) -> Result<Vec<PathBuf>> {
    let one = |part| {
        let base = work.join(name(part));
        tree::fill(&base.join("usr"), part, name(part), built, &LAYOUT)?;
        documents(&base, part, facts)?;
        control(&base, part, facts, work)?;
        let file = to.join(format!("{}_{}_{ARCHITECTURE}.deb", name(part), facts.version));
        let mut build = Command::new("dpkg-deb");
        // More threads would divide the data in another way.
        build.env("DPKG_DEB_THREADS_MAX", "1").env("SOURCE_DATE_EPOCH", facts.time.to_string());
        build.args(["--root-owner-group", "-Zxz", &format!("-z{}", facts.level)]);
        command::run(
            build.arg("--build").arg(&base).arg(&file).stdout(std::process::Stdio::null()),
        )?;
        Ok(file)
    };
    PackagePart::OF_DEBIAN.into_iter().map(one).collect()
}

/// The documents that Debian's policy demands.
fn documents(base: &Path, part: PackagePart, facts: &ReleaseFacts) -> Result<()> {
    let doc = base.join("usr/share/doc").join(name(part));
    fs::create_dir_all(&doc)?;
    write(&doc.join("copyright"), &facts.copyright, 0o644)?;
    // dpkg(1) calls the changelog of a package without a Debian revision so.
    let changelog = doc.join("changelog");
    let entry = format!(
        "defuse ({}) unstable; urgency=medium\n\n  * CHANGELOG.md in the package defuse has the changes.\n\n \
         -- {}  {}\n",
        facts.version,
        facts.maintainer,
        facts.date()?
    );
    write(&changelog, &entry, 0o644)?;
    tree::gzip(&changelog)?;
    if part != PackagePart::Program {
        return Ok(());
    }
    write(&doc.join("NOTICE"), &facts.notices, 0o644)?;
    ["NOTICE", "CHANGELOG.md"].iter().try_for_each(|file| tree::gzip(&doc.join(file)))
}

/// Writes the directory with the description of the package.
fn control(base: &Path, part: PackagePart, facts: &ReleaseFacts, work: &Path) -> Result<()> {
    let files = tree::paths(base)?;
    let about = base.join("DEBIAN");
    fs::create_dir_all(&about)?;
    fs::set_permissions(&about, Permissions::from_mode(0o755))?;
    let (mut sums, mut bytes) = (String::new(), 0);
    for file in &files {
        let path = base.join(file);
        let meta = path.symlink_metadata()?;
        // As dpkg-gencontrol(1) counts.
        bytes += if meta.is_file() { meta.len().div_ceil(1024) } else { 1 };
        if meta.is_file() {
            let line = command::output(Command::new("md5sum").arg(file).current_dir(base))?;
            sums += &line;
        }
    }
    write(&about.join("md5sums"), &sums, 0o644)?;
    let needs = needs(base, &files, work)?;
    write(&about.join("control"), &fields(part, facts, &needs, bytes), 0o644)?;
    match part {
        PackagePart::Program => {
            write(&about.join("postinst"), include_str!("deb/postinst"), 0o755)?;
            write(&about.join("prerm"), include_str!("deb/prerm"), 0o755)?;
            write(&about.join("postrm"), include_str!("deb/postrm"), 0o755)
        }
        PackagePart::Library => {
            let (library, number) = SONAME.split_once(".so.").context("a SONAME has a number")?;
            let line = format!("{library} {number} {} (>= {})\n", name(part), facts.version);
            write(&about.join("shlibs"), &line, 0o644)?;
            write(&about.join("triggers"), "activate-noawait ldconfig\n", 0o644)
        }
        PackagePart::Python => {
            write(&about.join("prerm"), include_str!("deb/python3-prerm"), 0o755)
        }
        PackagePart::Study | PackagePart::Development => Ok(()),
    }
}

fn fields(part: PackagePart, facts: &ReleaseFacts, needs: &str, kibibytes: u64) -> String {
    let (summary, text) = part.description();
    let own = |other: PackagePart| format!("{} (= {})", name(other), facts.version);
    let depends = match part {
        PackagePart::Program | PackagePart::Library => needs.to_owned(),
        PackagePart::Study => format!("{}, {needs}", own(PackagePart::Program)),
        PackagePart::Development => own(PackagePart::Library),
        PackagePart::Python => format!("python3 (>= 3.9), {needs}"),
    };
    let section = match part {
        PackagePart::Program | PackagePart::Study => "utils",
        PackagePart::Library => "libs",
        PackagePart::Development => "libdevel",
        PackagePart::Python => "python",
    };
    let mut fields = format!(
        "Package: {}\nSource: defuse\nVersion: {}\nArchitecture: {ARCHITECTURE}\nMaintainer: {}\n\
         Installed-Size: {kibibytes}\nDepends: {depends}\n",
        name(part),
        facts.version,
        facts.maintainer
    );
    if part == PackagePart::Program {
        // fusermount3, by which users other than root mount.
        fields += "Recommends: fuse3\nSuggests: defuse-study\n";
    }
    if part == PackagePart::Python {
        fields += "Suggests: python3-fsspec\n";
    }
    let _ = write!(fields, "Section: {section}\nPriority: optional\n");
    if !facts.homepage.is_empty() {
        let _ = writeln!(fields, "Homepage: {}", facts.homepage);
    }
    let _ = writeln!(fields, "Description: {summary}");
    for line in lines(text, 76) {
        let _ = writeln!(fields, " {line}");
    }
    fields
}

/// The packages of the libraries that the program files really need, in the form of a field: what
/// dpkg-shlibdeps(1) says.
fn needs(base: &Path, files: &[PathBuf], work: &Path) -> Result<String> {
    let objects: Vec<PathBuf> =
        files.iter().map(|file| base.join(file)).filter(|file| is_linked(file)).collect();
    if objects.is_empty() {
        return Ok(String::new());
    }
    // The program reads the description of a source package.
    fs::create_dir_all(work.join("debian"))?;
    write(
        &work.join("debian/control"),
        "Source: defuse\n\nPackage: defuse\nArchitecture: any\n",
        0o644,
    )?;
    let mut ask = Command::new("dpkg-shlibdeps");
    ask.arg("-O").arg("--warnings=0").args(objects).current_dir(work);
    let said = command::output(&mut ask)?;
    let needs = said.trim().strip_prefix("shlibs:Depends=").unwrap_or_default();
    ensure!(needs.contains("libc6"), "dpkg-shlibdeps found no need of libc6: {said}");
    Ok(needs.to_owned())
}

/// True for programs and shared libraries: ELF, and no archive.
fn is_linked(file: &Path) -> bool {
    let is_link = file.symlink_metadata().is_ok_and(|meta| meta.is_symlink());
    !is_link && fs::read(file).is_ok_and(|bytes| bytes.starts_with(b"\x7fELF"))
}

/// `text` in lines of at most `width` characters.
pub fn lines(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut().filter(|line| line.len() + word.len() < width) {
            Some(line) => *line = format!("{line} {word}"),
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

fn write(file: &Path, text: &str, mode: u32) -> Result<()> {
    fs::write(file, text).with_context(|| file.display().to_string())?;
    Ok(fs::set_permissions(file, Permissions::from_mode(mode))?)
}

/// The errors of lintian(1) about packages, one a line; empty if there are none.
pub fn errors(packages: &[PathBuf]) -> Result<String> {
    let mut lintian = Command::new("lintian");
    lintian.args(["--allow-root", "--fail-on=none", "--tag-display-limit=0", "--color=never"]);
    lintian.args(packages);
    let said = command::output(&mut lintian)?;
    let mut counted: BTreeMap<&str, usize> = BTreeMap::new();
    for tag in said.lines().filter_map(|line| line.split(' ').next()) {
        *counted.entry(tag).or_default() += 1;
    }
    println!("lintian: {counted:?}");
    Ok(said.lines().filter(|line| line.starts_with("E:")).collect::<Vec<_>>().join("\n"))
}
