//! Debian's kernel and its modules, from a package that is unpacked below the directory of build
//! results and not installed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::apt::AptTool;
use crate::command;

/// The package that depends on the kernel of the release.
pub const PACKAGE: &str = "linux-image-amd64";

/// The variable that names a directory with another kernel: `boot/vmlinuz-VERSION` and
/// `lib/modules/VERSION`.
const OTHER: &str = "DEFUSE_GUEST_KERNEL";

/// A kernel that is unpacked.
pub struct UnpackedKernel {
    /// The directory of the package.
    root: PathBuf,
    version: String,
}

impl UnpackedKernel {
    /// The kernel of this release, which is downloaded unless it is in `dir`; or the kernel in
    /// [`OTHER`].
    pub fn get(dir: &Path) -> Result<UnpackedKernel> {
        if let Some(root) = std::env::var_os(OTHER) {
            return UnpackedKernel::find_below(root.into());
        }
        let apt = AptTool::for_this_machine();
        let package = match apt.dependency(PACKAGE, "linux-image-") {
            Ok(package) => package,
            Err(_) => {
                // A new machine has no package lists.
                apt.update()?;
                apt.dependency(PACKAGE, "linux-image-")?
            }
        };
        let root = dir.join(&package);
        let version = package.trim_start_matches("linux-image-").to_owned();
        let kernel = UnpackedKernel { root, version };
        if !kernel.modules().join("modules.dep").exists() {
            kernel.unpack(dir, &package, &apt)?;
        }
        Ok(kernel)
    }

    /// The kernel that `make` and `make modules_install INSTALL_MOD_PATH=ROOT` have left, with its
    /// image in `boot`.
    fn find_below(root: PathBuf) -> Result<UnpackedKernel> {
        let versions = root.join("lib/modules");
        let names = fs::read_dir(&versions).with_context(|| versions.display().to_string())?;
        let names = names.map_while(Result::ok).map(|entry| entry.file_name());
        let mut names: Vec<_> = names.filter_map(|name| name.into_string().ok()).collect();
        ensure!(names.len() == 1, "{}: not one version but {names:?}", versions.display());
        Ok(UnpackedKernel { version: names.remove(0), root })
    }

    fn unpack(&self, dir: &Path, package: &str, apt: &AptTool) -> Result<()> {
        println!("downloading {package} to {}", dir.display());
        let archive = apt.download(package, dir)?;
        let mut unpack = Command::new("dpkg-deb");
        command::run(unpack.arg("-x").arg(&archive).arg(&self.root))?;
        fs::remove_file(&archive)?;
        let mut depmod = Command::new(command::find("depmod").context("depmod is missing")?);
        command::run(depmod.arg("-b").arg(self.root_of_modules()).arg(&self.version))
    }

    /// The image that boots.
    pub fn image(&self) -> PathBuf {
        self.root.join(format!("boot/vmlinuz-{}", self.version))
    }

    /// Its version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The directory above `lib/modules`: /usr in newer releases.
    fn root_of_modules(&self) -> PathBuf {
        let usr = self.root.join("usr");
        if usr.join("lib/modules").exists() { usr } else { self.root.clone() }
    }

    fn modules(&self) -> PathBuf {
        self.root_of_modules().join("lib/modules").join(&self.version)
    }

    /// Returns the names among `names` that are modules of this kernel.
    pub fn filter_existing<'a>(&self, names: &[&'a str]) -> Result<Vec<&'a str>> {
        let needs = fs::read_to_string(self.modules().join("modules.dep"))?;
        let known = ModuleDependencies::parse(&needs);
        Ok(names.iter().copied().filter(|name| known.find(name).is_some()).collect())
    }

    /// The modules `names` with all that they need, in the order in which they are loaded: names
    /// and contents. Those that are a part of the kernel are left out.
    pub fn with_needed(&self, names: &[&str]) -> Result<Vec<(String, Vec<u8>)>> {
        let read = |name: &str| fs::read_to_string(self.modules().join(name));
        let (needs, builtin) = (read("modules.dep")?, read("modules.builtin")?);
        let known = ModuleDependencies::parse(&needs);
        let mut order = Vec::new();
        for name in names {
            if known.find(name).is_none() && builtin.lines().any(|path| module_name(path) == *name)
            {
                continue;
            }
            known.visit(name, &mut order)?;
        }
        order.iter().map(|path| Ok((module_name(path), self.content(path)?))).collect()
    }

    /// The content of a module, which may be compressed.
    fn content(&self, path: &str) -> Result<Vec<u8>> {
        let path = self.modules().join(path);
        if path.extension().is_some_and(|end| end == "ko") {
            return Ok(fs::read(path)?);
        }
        let said = Command::new("xz").arg("-dc").arg(&path).output()?;
        ensure!(said.status.success(), "xz cannot unpack {}", path.display());
        Ok(said.stdout)
    }
}

/// modules.dep: the path of each module, and of those that it needs.
struct ModuleDependencies<'a>(BTreeMap<String, (&'a str, Vec<&'a str>)>);

impl<'a> ModuleDependencies<'a> {
    fn parse(text: &'a str) -> Self {
        let line = |line: &'a str| {
            let (path, needs) = line.split_once(':')?;
            Some((module_name(path), (path, needs.split_whitespace().collect())))
        };
        ModuleDependencies(text.lines().filter_map(line).collect())
    }

    fn find(&self, name: &str) -> Option<&(&'a str, Vec<&'a str>)> {
        self.0.get(name)
    }

    /// Adds the path of a module after those that it needs. depmod(8) lists all of them, the last
    /// one first.
    fn visit(&self, name: &str, order: &mut Vec<&'a str>) -> Result<()> {
        let Some((path, needs)) = self.find(name) else { bail!("the kernel has no module {name}") };
        for path in needs.iter().rev().chain([path]) {
            if !order.contains(path) {
                order.push(path);
            }
        }
        Ok(())
    }
}

/// The name of the module at a path, in the form of modprobe(8).
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split('.').next().unwrap_or(file).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_comes_after_what_it_needs_and_only_once() {
        let text = "kernel/a.ko:\nkernel/b-x.ko.xz: kernel/a.ko\nkernel/c.ko: kernel/b-x.ko.xz kernel/a.ko\n";
        let known = ModuleDependencies::parse(text);
        let mut order = Vec::new();
        known.visit("c", &mut order).unwrap();
        known.visit("b_x", &mut order).unwrap();
        assert_eq!(order, ["kernel/a.ko", "kernel/b-x.ko.xz", "kernel/c.ko"]);
        let error = known.visit("d", &mut order).unwrap_err();
        assert_eq!(error.to_string(), "the kernel has no module d");
    }
}
