//! The helper of mount(8) and fstab: `mount.fuse.defuse SOURCE DIR [-sfnv] [-N ns]
//! [-o opts] [-t type]`, and as fuse3's mount.fuse3 does: `defuse SOURCE DIR [-o opts]`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::process::ExitCode;

use crate::error::{self, CommandFailure, Result};
use crate::mount::{self, MountArgs};
use crate::{mount_flags, options, remount};

/// Exit codes that mount(8) expects of a helper: wrong use, and a failed mount.
const WRONG_USE: u8 = 1;
const MOUNT_FAILED: u8 = 32;

/// Options for mount(8) and other readers of fstab. The options about access times of directories
/// have no effect on a FUSE mount.
const NOT_OURS: &[&str] = &[
    "defaults",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "noowner",
    "group",
    "nogroup",
    "nofail",
    "_netdev",
    "norelatime",
    "diratime",
    "nodiratime",
    "nostrictatime",
    "lazytime",
    "nolazytime",
    "iversion",
    "noiversion",
    "mand",
    "nomand",
    "loud",
    "silent",
    "comment",
];

/// The parsed arguments.
#[derive(Debug, Default)]
struct HelperRequest {
    mount: MountArgs,
    /// Check everything, but mount nothing.
    fake: bool,
    /// Change the existing mount by these options.
    remount: Option<Vec<String>>,
}

/// True if the program was called as a helper of mount(8): by its name, or with a source in place
/// of a subcommand.
pub fn is_meant(arguments: &[OsString]) -> bool {
    let by_name = is_by_name(arguments);
    let source = arguments.get(1).is_some_and(|first| {
        !first.as_bytes().starts_with(b"-") && first.as_bytes().contains(&b':')
    });
    by_name || source && arguments.len() > 2
}

fn is_by_name(arguments: &[OsString]) -> bool {
    let name = arguments.first().and_then(|program| Path::new(program).file_name());
    name.is_some_and(|name| name.as_bytes().starts_with(b"mount."))
}

/// Mounts as the helper, with the exit codes of mount(8).
pub fn run(arguments: Vec<OsString>) -> ExitCode {
    let is_root = rustix::process::geteuid().is_root();
    let outcome = parse(arguments, is_root).and_then(|request| match request.fake {
        _ if request.remount.is_some() => {
            let options = request.remount.unwrap_or_default();
            remount::run(&request.mount.mountpoint, &options, request.fake)
        }
        true => mount::check(request.mount),
        false => mount::run(request.mount),
    });
    match outcome {
        Err(
            failure @ (CommandFailure::Usage(_)
            | CommandFailure::Failed(_)
            | CommandFailure::Interrupted(_)),
        ) => {
            error::warn(&failure);
            let wrong_use = matches!(failure, CommandFailure::Usage(_));
            ExitCode::from(if wrong_use { WRONG_USE } else { MOUNT_FAILED })
        }
        Ok(()) | Err(CommandFailure::OutputClosed) => ExitCode::SUCCESS,
    }
}

fn parse(arguments: Vec<OsString>, is_root: bool) -> Result<HelperRequest> {
    let mut request = HelperRequest::default();
    let (mut words, mut lists, mut sloppy) = (Vec::new(), Vec::new(), false);
    let by_name = is_by_name(&arguments);
    let mut arguments = arguments.into_iter().skip(1);
    while let Some(argument) = arguments.next() {
        let Some(flags) = argument.as_bytes().strip_prefix(b"-") else {
            words.push(argument);
            continue;
        };
        // Flags may be joined, and a value may follow its flag at once.
        for (at, flag) in flags.iter().enumerate() {
            let mut value = || match &flags[at + 1..] {
                [] => arguments.next().ok_or_else(|| needs_value(*flag)),
                rest => Ok(OsString::from_vec(rest.to_vec())),
            };
            match flag {
                b's' => sloppy = true,
                b'f' => request.fake = true,
                b'v' => request.mount.process.verbose += 1,
                b'n' => {}
                b't' => drop(value()?),
                b'o' => lists.push(value()?),
                b'N' => return Err(namespace()),
                _ => {
                    return Err(CommandFailure::Usage(format!(
                        "there is no flag {}",
                        argument.display()
                    )));
                }
            }
            if matches!(flag, b't' | b'o') {
                break;
            }
        }
    }
    let [source, mountpoint] = <[OsString; 2]>::try_from(words).map_err(|words| {
        let words = words.len();
        CommandFailure::Usage(format!(
            "a source and a directory are needed, but there are {words} arguments"
        ))
    })?;
    request.mount.source = strip_program(&source);
    request.mount.mountpoint = mountpoint.into();
    let mut options = split(&lists)?;
    let is_remount = options.iter().any(|option| option == "remount");
    if by_name && !is_remount && is_root {
        add_flags(&mut options);
    }
    match is_remount {
        true => request.remount = Some(remountable(options, sloppy)),
        false => request.mount.options = filter_own(&options, sloppy),
    }
    Ok(request)
}

/// In fstab, fuse3 has the program before the source: `defuse#memory:`.
fn strip_program(source: &OsStr) -> OsString {
    let source = source.as_bytes();
    OsString::from_vec(source.strip_prefix(b"defuse#").unwrap_or(source).to_vec())
}

/// All options, split at commas.
fn split(lists: &[OsString]) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for list in lists {
        let list = list.to_str().ok_or_else(|| {
            CommandFailure::Usage(format!("options {} are not UTF-8", list.display()))
        })?;
        all.extend(options::split(list));
    }
    Ok(all)
}

/// Adds `dev` and `suid`, as mount.fuse3(8) does: mount(8) drops them before it calls a helper,
/// because they are the kernel's default, but has `nodev` and `nosuid` for its users' mounts, whose
/// options are left as they are.
fn add_flags(options: &mut Vec<String>) {
    let has = |options: &[String], names: &[&str]| {
        options.iter().any(|option| names.contains(&name_of(option)))
    };
    if has(options, &["user", "users", "owner", "group"]) {
        return;
    }
    for (flag, without) in [("dev", "nodev"), ("suid", "nosuid")] {
        if !has(options, &[flag, without]) {
            options.push(flag.to_owned());
        }
    }
}

fn name_of(option: &str) -> &str {
    option.split_once('=').map_or(option, |(name, _)| name)
}

fn is_ignored(name: &str) -> bool {
    name.starts_with("x-") || name.starts_with("X-") || NOT_OURS.contains(&name)
}

/// The options without those for mount(8).
fn filter_own(all: &[String], sloppy: bool) -> Vec<String> {
    let is_ours = |option: &&String| {
        let name = name_of(option);
        !is_ignored(name) && (!sloppy || options::is_known(name))
    };
    all.iter().filter(is_ours).map(|option| options::escape(option)).collect()
}

/// The options of a remount, which include those about access times.
fn remountable(all: Vec<String>, sloppy: bool) -> Vec<String> {
    let is_meant = |option: &String| {
        let name = name_of(option);
        mount_flags::find(name).is_some()
            || !is_ignored(name) && (!sloppy || options::is_known(name))
    };
    all.into_iter().filter(is_meant).collect()
}

fn needs_value(flag: u8) -> CommandFailure {
    CommandFailure::Usage(format!("-{} needs a value", char::from(flag)))
}

fn namespace() -> CommandFailure {
    CommandFailure::Usage("-N is not supported: enter the namespace first (nsenter --mount)".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(line: &str) -> Result<HelperRequest> {
        parse(line.split(' ').map(OsString::from).collect(), false)
    }

    #[test]
    fn the_arguments_of_mount_8_are_parsed() {
        let line = "mount.fuse.defuse memory: /m -sv -o rw,noauto,x-systemd.automount,size=1M -t fuse.defuse";
        let requested = request(line).unwrap();
        assert_eq!(
            (requested.mount.source, requested.mount.mountpoint),
            ("memory:".into(), "/m".into())
        );
        assert_eq!(
            (requested.mount.options, requested.mount.process.verbose),
            (vec!["rw".into(), "size=1M".into()], 1)
        );
        assert!(!requested.fake);
        let requested = request(r"mount.fuse.defuse defuse#memory: /m -nfofsname=a\,b").unwrap();
        assert_eq!((requested.mount.source, requested.fake), ("memory:".into(), true));
        assert_eq!(requested.mount.options, [r"fsname=a\,b"]);
        let requested = request("mount.fuse.defuse memory: /m -o strictatime,nodiratime").unwrap();
        assert_eq!(requested.mount.options, ["strictatime"]);
    }

    #[test]
    fn unknown_options_are_dropped_only_with_the_flag_s() {
        assert_eq!(request("m memory: /m -o what").unwrap().mount.options, ["what"]);
        assert!(request("m -s memory: /m -o what").unwrap().mount.options.is_empty());
    }

    #[test]
    fn a_remount_is_recognized() {
        let requested = request("m memory: /m -o rw,noauto,noatime,remount,size=1M").unwrap();
        assert_eq!(requested.remount.unwrap(), ["rw", "noatime", "remount", "size=1M"]);
        assert!(requested.mount.options.is_empty());
        assert_eq!(request("m memory: /m -o ro").unwrap().remount, None);
    }

    #[test]
    fn root_has_the_flags_that_mount_8_drops() {
        let options = |line: &str, is_root: bool| {
            let words = line.split(' ').map(OsString::from).collect();
            parse(words, is_root).unwrap().mount.options.join(",")
        };
        let helper = |list: &str| options(&format!("mount.fuse.defuse memory: /m -o {list}"), true);
        assert_eq!(helper("rw"), "rw,dev,suid");
        assert_eq!(helper("nosuid"), "nosuid,dev");
        assert_eq!(helper("suid,nodev"), "suid,nodev");
        assert_eq!(helper("rw,user=u"), "rw");
        assert_eq!(options("mount.fuse.defuse memory: /m -o rw", false), "rw");
        // mount.fuse3(8) has added them.
        assert_eq!(options("defuse memory: /m -o rw", true), "rw");
    }

    #[test]
    fn what_cannot_be_done_is_refused() {
        for (line, says) in [
            ("m memory:", "there are 1 arguments"),
            ("m memory: /m -o", "-o needs a value"),
            ("m memory: /m -N 7", "nsenter"),
            ("m memory: /m -z", "no flag -z"),
        ] {
            let text = request(line).unwrap_err().to_string();
            assert!(text.contains(says), "{line}: {text}");
        }
    }

    #[test]
    fn a_call_as_mount_helper_is_recognized() {
        let meant = |line: &str| is_meant(&line.split(' ').map(OsString::from).collect::<Vec<_>>());
        assert!(meant("/sbin/mount.fuse.defuse"));
        assert!(meant("/usr/bin/defuse memory: /m -o rw"));
        assert!(!meant("defuse mount memory: /m"));
        assert!(!meant("defuse memory:"));
        assert!(!meant("defuse --x=a:b c"));
    }
}
