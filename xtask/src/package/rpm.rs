//! Packages for rpm(8), by rpmbuild(8): it finds what the programs need, with the versions of
//! glibc's symbols.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::deb::lines;
use super::release::ReleaseFacts;
use super::tree::{self, BuiltFiles, PackageLayout, PackagePart};
use crate::command;

/// The paths of distributions with rpm.
const LAYOUT: PackageLayout = PackageLayout {
    prefix: "/usr",
    libdir: "lib64",
    library_mode: 0o755,
    compressed: true,
    doc: None,
};

fn name(part: PackagePart) -> &'static str {
    match part {
        PackagePart::Program => "defuse",
        PackagePart::Study => "defuse-study",
        PackagePart::Library => "libdefuse0",
        PackagePart::Development => "libdefuse-devel",
        // Distributions with rpm have a directory of modules for each version of Python: there is
        // the wheel.
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
    let mut sections = String::new();
    for part in PackagePart::ALL {
        let base = work.join(name(part));
        tree::fill(&base.join("usr"), part, name(part), built, &LAYOUT)?;
        if part == PackagePart::Program {
            let notice = base.join("usr/share/doc/defuse/NOTICE");
            fs::write(&notice, &facts.notices)?;
            tree::gzip(&notice)?;
            for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
                let to = base.join("usr/share/licenses/defuse").join(licence);
                fs::create_dir_all(to.parent().unwrap_or(&to))?;
                fs::copy(command::root().join(licence), to)?;
            }
        }
        sections += &section(part, &base)?;
    }
    let spec = work.join("defuse.spec");
    fs::write(&spec, head(facts, work) + &sections)?;
    build(&spec, facts, work)?;
    let made = work.join("rpmbuild/RPMS/x86_64");
    let mut packages = Vec::new();
    for entry in fs::read_dir(&made).with_context(|| made.display().to_string())? {
        let entry = entry?;
        let file = to.join(entry.file_name());
        fs::copy(entry.path(), &file)?;
        packages.push(file);
    }
    packages.sort();
    ensure!(packages.len() == PackagePart::ALL.len(), "rpmbuild made {packages:?}");
    Ok(packages)
}

fn build(spec: &Path, facts: &ReleaseFacts, work: &Path) -> Result<()> {
    let mut rpmbuild = Command::new("rpmbuild");
    rpmbuild.env("SOURCE_DATE_EPOCH", facts.time.to_string()).env("LC_ALL", "C");
    rpmbuild.args(["-bb", "--quiet", "--target", "x86_64-linux"]);
    let top = work.join("rpmbuild");
    for (key, value) in [
        ("_topdir", &*top.display().to_string()),
        ("_buildhost", "localhost"),
        ("use_source_date_epoch_as_buildtime", "1"),
        ("clamp_mtime_to_source_date_epoch", "1"),
        // The name of the two settings above from rpm 4.20 on.
        ("build_mtime_policy", "clamp_to_source_date_epoch"),
        ("source_date_epoch_from_changelog", "0"),
        // The files are ready.
        ("__os_install_post", "%{nil}"),
        ("debug_package", "%{nil}"),
        ("_build_id_links", "none"),
        // One thread, because more would divide the data in another way.
        ("_binary_payload", &*format!("w{}T1.xzdio", facts.level)),
    ] {
        rpmbuild.args(["--define", &format!("{key} {value}")]);
    }
    command::run(rpmbuild.arg(spec).stdout(Stdio::null()))
}

/// The description of the source, and the main package.
fn head(facts: &ReleaseFacts, work: &Path) -> String {
    let mut spec = format!(
        "Name: defuse\nVersion: {}\nRelease: 1\nLicense: MIT OR Apache-2.0\nBuildArch: x86_64\n",
        facts.version
    );
    if !facts.homepage.is_empty() {
        let _ = writeln!(spec, "URL: {}", facts.homepage);
    }
    // Without fuse3 only root mounts.
    let _ = writeln!(spec, "Packager: {}\nRecommends: fuse3", facts.maintainer);
    spec += &describe(PackagePart::Program);
    let _ = writeln!(spec, "%install\nmkdir -p %{{buildroot}}");
    for part in PackagePart::ALL {
        let _ = writeln!(spec, "cp -a {}/. %{{buildroot}}/", work.join(name(part)).display());
    }
    spec + "\n"
}

/// Summary and description.
fn describe(part: PackagePart) -> String {
    let (summary, text) = part.description();
    let option =
        if part == PackagePart::Program { String::new() } else { format!(" -n {}", name(part)) };
    format!("Summary: {summary}\n\n%description{option}\n{}\n\n", lines(text, 76).join("\n"))
}

/// The files of a package, after its description unless it is the main one.
fn section(part: PackagePart, base: &Path) -> Result<String> {
    let mut text = String::new();
    let option = match part {
        PackagePart::Program => String::new(),
        _ => {
            let _ = write!(text, "%package -n {}\n{}", name(part), needs(part));
            text += &describe(part);
            format!(" -n {}", name(part))
        }
    };
    match part {
        PackagePart::Library => {
            let _ = writeln!(
                text,
                "%post -n {0} -p /sbin/ldconfig\n%postun -n {0} -p /sbin/ldconfig\n",
                name(part)
            );
        }
        PackagePart::Program => text += SCRIPTS,
        PackagePart::Study | PackagePart::Development | PackagePart::Python => {}
    }
    let _ = writeln!(text, "%files{option}\n%defattr(-,root,root,-)");
    if part == PackagePart::Program {
        text +=
            "%dir /usr/lib/defuse\n%dir /usr/share/doc/defuse\n%dir /usr/share/doc/defuse/docs\n";
        text += "%dir /usr/share/licenses/defuse\n";
    }
    for file in tree::paths(base)? {
        let _ = writeln!(text, "\"/{}\"", file.display());
    }
    Ok(text + "\n")
}

fn needs(part: PackagePart) -> String {
    let own =
        |other: PackagePart| format!("Requires: {} = %{{version}}-%{{release}}\n", name(other));
    match part {
        PackagePart::Study => own(PackagePart::Program),
        PackagePart::Development => own(PackagePart::Library),
        PackagePart::Program | PackagePart::Library | PackagePart::Python => String::new(),
    }
}

/// systemd learns of new units, and a removal, which is no upgrade, unmounts their mounts.
const SCRIPTS: &str = "\
%post
if [ -d /run/systemd/system ]; then systemctl --system daemon-reload || :; fi

%preun
if [ $1 -eq 0 ] && [ -d /run/systemd/system ]; then
    systemctl stop 'defuse@*.service' defuse-manager.service || :
fi

%postun
if [ -d /run/systemd/system ]; then systemctl --system daemon-reload || :; fi
if [ $1 -eq 0 ]; then
    rm -rf /var/cache/defuse
    rm -f /etc/systemd/system/*.wants/defuse@*.service /etc/systemd/system/*.wants/defuse-manager.service
fi

";
