//! The helper of umount(8): `umount.fuse.defuse DIR [-flnrv] [-t type]`. With it, umount(8) and
//! systemd wait until everything is durable, as `defuse umount` does.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;

use crate::error::{self, CommandFailure, Result};
use crate::umount::{self, UmountArgs};

/// Exit codes that umount(8) expects of a helper: wrong use, and a failed unmount.
const WRONG_USE: u8 = 1;
const FAILED: u8 = 32;

/// True if the program was called as a helper of umount(8), by its name.
pub fn is_meant(arguments: &[OsString]) -> bool {
    let name = arguments.first().and_then(|program| Path::new(program).file_name());
    name.is_some_and(|name| name.as_bytes().starts_with(b"umount."))
}

/// Unmounts as the helper, with the exit codes of umount(8).
pub fn run(arguments: &[OsString]) -> ExitCode {
    match parse(arguments).and_then(|args| umount::run(&args)) {
        Ok(()) | Err(CommandFailure::OutputClosed) => ExitCode::SUCCESS,
        Err(failure) => {
            error::warn(&failure);
            let wrong_use = matches!(failure, CommandFailure::Usage(_));
            ExitCode::from(if wrong_use { WRONG_USE } else { FAILED })
        }
    }
}

fn parse(arguments: &[OsString]) -> Result<UmountArgs> {
    let mut args = UmountArgs { silent: true, ..UmountArgs::default() };
    let mut rest = arguments.iter().skip(1);
    while let Some(word) = rest.next() {
        let Some(flags) = word.as_bytes().strip_prefix(b"-") else {
            args.mountpoints.push(word.into());
            continue;
        };
        for (at, flag) in flags.iter().enumerate() {
            match flag {
                b'l' => args.lazy = true,
                b'f' => args.force = true,
                // There is no mtab, and an unmount that fails changes nothing.
                b'n' | b'r' => {}
                b'v' => args.silent = false,
                b't' => {
                    // The value follows the flag at once, or is the next word.
                    if flags.len() == at + 1 {
                        rest.next();
                    }
                    break;
                }
                _ => {
                    return Err(CommandFailure::Usage(format!(
                        "there is no flag {}",
                        word.display()
                    )));
                }
            }
        }
    }
    if args.mountpoints.len() != 1 {
        let count = args.mountpoints.len();
        return Err(CommandFailure::Usage(format!(
            "one directory is needed, but there are {count}"
        )));
    }
    Ok(args)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(line: &str) -> Result<(Vec<std::path::PathBuf>, bool, bool)> {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        parse(&words).map(|args| (args.mountpoints, args.lazy, args.force))
    }

    #[test]
    fn the_arguments_of_umount_8_are_parsed() {
        let of = |line: &str| parse_line(&format!("/sbin/umount.fuse.defuse {line}")).unwrap();
        assert_eq!(of("/m"), (vec!["/m".into()], false, false));
        assert_eq!(of("/m -n -v -t fuse.defuse"), (vec!["/m".into()], false, false));
        assert_eq!(of("-lrtfuse.defuse /m"), (vec!["/m".into()], true, false));
        assert_eq!(of("/m -f"), (vec!["/m".into()], false, true));
        for wrong in
            ["umount.fuse.defuse", "umount.fuse.defuse /a /b", "umount.fuse.defuse /a -N 7"]
        {
            assert!(matches!(parse_line(wrong), Err(CommandFailure::Usage(_))), "{wrong}");
        }
    }

    #[test]
    fn only_a_name_of_a_helper_makes_it_one() {
        let is = |word: &str| is_meant(&[word.into(), "/m".into()]);
        assert!(is("/sbin/umount.fuse.defuse") && is("umount.fuse"));
        assert!(!is("defuse") && !is("mount.fuse.defuse") && !is("/umount.d/defuse"));
    }
}
