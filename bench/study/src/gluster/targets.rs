//! The targets: GlusterFS's own client, and defuse in several ways.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use defuse_measure::gluster::HOST;
use serde::{Deserialize, Serialize};

use super::cases::VolumeKind;
use super::results::GlusterTarget;

/// The beginning of the names of GlusterFS's own client, before its number of readers.
pub const NATIVE: &str = "native-";
/// `defuse mount` with one worker.
pub const ONE: &str = "one";
/// `defuse mount` with the policy of the paper.
pub const PAPER: &str = "paper";
/// `defuse mount` with readers that do the work, too.
pub const MERGED: &str = "merged";
/// `defuse mount` as it is by default.
pub const ADAPTIVE: &str = "adaptive";
/// `defuse mount` over io_uring.
pub const URING: &str = "uring";
/// `defuse run`.
pub const RUN: &str = "run";

/// All targets.
pub const ALL: [&str; 9] =
    ["native-1", "native-2", "native-4", ONE, PAPER, MERGED, ADAPTIVE, URING, RUN];

/// The path of the volume within a run.
pub const WITHIN: &str = "/defuse-bench";

/// A target to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GlusterTargetSpec {
    /// Its name.
    pub name: String,
    /// The way.
    pub how: VolumeAccess,
}

/// The way in which a target serves a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VolumeAccess {
    /// GlusterFS's own client with this number of readers.
    Native(u32),
    /// `defuse mount` with these arguments.
    Mount(Vec<String>),
    /// `defuse run`.
    Run,
}

impl GlusterTargetSpec {
    /// The target of a name.
    ///
    /// # Errors
    ///
    /// A message for the user if there is none.
    pub fn from_name(name: &str) -> Result<GlusterTargetSpec, String> {
        let mount = |words: &[&str]| {
            VolumeAccess::Mount(words.iter().map(|&word| word.to_owned()).collect())
        };
        let device = ["-o", "no_io_uring"];
        let how = match name {
            ONE => mount(&["--workers", "1", device[0], device[1]]),
            PAPER => mount(&["--workers", "paper", device[0], device[1]]),
            MERGED => mount(&["--workers", "merged", device[0], device[1]]),
            ADAPTIVE => mount(&device),
            URING => mount(&["-o", "io_uring"]),
            RUN => VolumeAccess::Run,
            _ => {
                let readers = name.strip_prefix(NATIVE).and_then(|readers| readers.parse().ok());
                let readers = readers.filter(|readers| (1..=64).contains(readers));
                VolumeAccess::Native(readers.ok_or_else(|| {
                    format!("there is no target {name:?}: write {}", ALL.join(", "))
                })?)
            }
        };
        Ok(GlusterTargetSpec { name: name.to_owned(), how })
    }

    /// A further mount of defuse: `NAME=OPTIONS`.
    ///
    /// # Errors
    ///
    /// A message for the user if the text has another form.
    pub fn variant(text: &str) -> Result<GlusterTargetSpec, String> {
        let (name, options) = text
            .split_once('=')
            .filter(|(name, options)| !name.is_empty() && !options.is_empty())
            .ok_or_else(|| format!("{text:?} is no variant: write NAME=OPTIONS"))?;
        if GlusterTargetSpec::from_name(name).is_ok() {
            return Err(format!("{name} is a target already: choose another name"));
        }
        let how = VolumeAccess::Mount(vec!["-o".to_owned(), options.to_owned()]);
        Ok(GlusterTargetSpec { name: name.to_owned(), how })
    }

    /// True for defuse.
    pub fn is_ours(&self) -> bool {
        !matches!(self.how, VolumeAccess::Native(_))
    }

    /// A description for the report.
    pub fn target(&self) -> GlusterTarget {
        let how = match &self.how {
            VolumeAccess::Native(readers) => format!("glusterfs --reader-thread-count={readers}"),
            VolumeAccess::Mount(words) => format!("defuse mount {}", words.join(" ")),
            VolumeAccess::Run => "defuse run, without a mount".to_owned(),
        };
        GlusterTarget { name: self.name.clone(), how }
    }
}

/// The paths of a volume and its mounts.
#[derive(Debug)]
pub struct VolumePaths<'a> {
    /// The volume.
    pub place: VolumeKind,
    /// The description of a volume without servers.
    pub graph: &'a Path,
    /// The path of this program.
    pub program: &'a Path,
    /// Directory for logs and mount points.
    pub work: &'a Path,
}

impl VolumePaths<'_> {
    /// The mount point of a target.
    pub fn mountpoint(&self, spec: &GlusterTargetSpec) -> PathBuf {
        self.work.join(format!("mnt-{}", spec.name))
    }

    /// The directory of the volume for programs.
    pub fn root(&self, spec: &GlusterTargetSpec) -> PathBuf {
        if spec.how == VolumeAccess::Run { WITHIN.into() } else { self.mountpoint(spec) }
    }

    /// The command that serves the volume in the foreground; `None` for a run.
    pub fn daemon(&self, spec: &GlusterTargetSpec) -> Option<Vec<OsString>> {
        match &spec.how {
            VolumeAccess::Native(readers) => Some(self.native(spec, *readers)),
            VolumeAccess::Mount(arguments) => {
                let mut words = vec![self.program.into(), "mount".into(), "--foreground".into()];
                words.extend(arguments.iter().map(OsString::from));
                // Within the sandbox, a daemon has no access to the directories of the bricks.
                let more = (self.place == VolumeKind::Graph).then_some(["-o", "no_sandbox"]);
                words.extend(more.into_iter().flatten().map(OsString::from));
                words.extend(["--".into(), self.source().into(), self.mountpoint(spec).into()]);
                Some(words)
            }
            VolumeAccess::Run => None,
        }
    }

    /// The command of the shell from which programs are started.
    pub fn shell(&self, spec: &GlusterTargetSpec) -> Vec<OsString> {
        if spec.how != VolumeAccess::Run {
            return vec!["sh".into()];
        }
        let mount = format!("{WITHIN}={}", self.source());
        let words = ["run", "--mount", &mount, "--", "sh"].map(OsString::from);
        [&[self.program.into()], words.as_slice()].concat()
    }

    fn native(&self, spec: &GlusterTargetSpec, readers: u32) -> Vec<OsString> {
        let mut words: Vec<OsString> =
            ["glusterfs", "--no-daemon", "--log-level=WARNING"].map(OsString::from).to_vec();
        words.push(format!("--reader-thread-count={readers}").into());
        words.push(
            format!("--log-file={}", self.work.join(format!("{}.log", spec.name)).display()).into(),
        );
        match self.place {
            VolumeKind::Graph => words.push(format!("--volfile={}", self.graph.display()).into()),
            place => words.extend([
                format!("--volfile-server={HOST}").into(),
                format!("--volfile-id={}", place.name()).into(),
            ]),
        }
        words.push(self.mountpoint(spec).into());
        words
    }

    fn source(&self) -> String {
        match self.place {
            VolumeKind::Graph => format!("gluster:{}", self.graph.display()),
            place => format!("gluster://{HOST}/{}", place.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_have_names() {
        for name in ALL {
            assert_eq!(GlusterTargetSpec::from_name(name).unwrap().name, name);
        }
        assert_eq!(
            GlusterTargetSpec::from_name("native-16").unwrap().how,
            VolumeAccess::Native(16)
        );
        for name in ["native-0", "native-65", "native", "other"] {
            assert!(
                GlusterTargetSpec::from_name(name).unwrap_err().contains("write native-1, "),
                "{name}"
            );
        }
        let variant = GlusterTargetSpec::variant("p8=workers=paper:8,no_io_uring").unwrap();
        assert_eq!(
            variant.how,
            VolumeAccess::Mount(vec!["-o".into(), "workers=paper:8,no_io_uring".into()])
        );
        assert!(
            GlusterTargetSpec::variant("one=workers=3").is_err()
                && GlusterTargetSpec::variant("x").is_err()
        );
    }

    #[test]
    fn commands_name_the_volume() {
        let text =
            |words: Vec<OsString>| words.join(std::ffi::OsStr::new(" ")).into_string().unwrap();
        let paths = |place| VolumePaths {
            place,
            graph: Path::new("/w/graph.vol"),
            program: Path::new("/bin/defuse"),
            work: Path::new("/w"),
        };
        let spec = |name| GlusterTargetSpec::from_name(name).unwrap();
        let dist = paths(VolumeKind::Dist);
        assert_eq!(
            text(dist.daemon(&spec("paper")).unwrap()),
            "/bin/defuse mount --foreground --workers paper -o no_io_uring -- gluster://127.1.1.1/dist /w/mnt-paper"
        );
        let native = text(dist.daemon(&spec("native-4")).unwrap());
        assert!(native.contains("--reader-thread-count=4") && native.contains("--volfile-id=dist"));
        assert_eq!(
            text(dist.shell(&spec("run"))),
            "/bin/defuse run --mount /defuse-bench=gluster://127.1.1.1/dist -- sh"
        );
        let graph = paths(VolumeKind::Graph);
        assert!(
            text(graph.daemon(&spec("one")).unwrap())
                .contains("-o no_sandbox -- gluster:/w/graph.vol /w/")
        );
        assert!(text(graph.shell(&spec("run"))).contains("=gluster:/w/graph.vol --"));
        assert!(text(graph.daemon(&spec("native-1")).unwrap()).contains("--volfile=/w/graph.vol"));
    }
}
