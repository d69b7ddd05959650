//! The command line of a program: `fuse_parse_cmdline` and the help texts.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::null_mut;

use crate::abi::{CmdlineOpts, FuseArgs};
use crate::args::{replace, words};
use crate::logging::error;
use crate::options::{ApiVersion, OptionOutcome, help, take_from};

/// The arguments of a command line that are for libfuse.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandLine {
    /// One thread.
    pub single: bool,
    /// Not in the background.
    pub foreground: bool,
    /// Messages about requests.
    pub debug: bool,
    /// The subtype was given.
    pub has_subtype: bool,
    /// The mount point.
    pub mountpoint: Option<CString>,
    /// `-V`.
    pub version: bool,
    /// `-h`.
    pub help: bool,
    /// A descriptor of the device for each thread.
    pub clone_fd: bool,
    /// Most threads that wait.
    pub max_idle_threads: Option<u32>,
    /// Most threads.
    pub max_threads: Option<u32>,
}

impl CommandLine {
    /// Parses the arguments, and returns those that are left for the mount and the library. An
    /// error is text for the user.
    pub fn parse(version: ApiVersion, words: &[CString]) -> Result<(Self, Vec<CString>), String> {
        let mut line = CommandLine::default();
        let is_three = version == ApiVersion::Three;
        let rest = take_from(words, |option| {
            let of_threads = |value: &str| value.parse().map_err(|_| refusal_message(option));
            match option.split_once('=') {
                Some(("subtype", _)) => {
                    line.has_subtype = true;
                    return Ok(OptionOutcome::Foreign);
                }
                Some(("max_idle_threads", value)) if is_three => {
                    line.max_idle_threads = Some(of_threads(value)?);
                }
                Some(("max_threads", value)) if is_three => {
                    line.max_threads = Some(of_threads(value)?)
                }
                None if option == "debug" => {
                    (line.debug, line.foreground) = (true, true);
                    return Ok(OptionOutcome::Foreign);
                }
                None if option == "clone_fd" && is_three => line.clone_fd = true,
                _ => return Ok(OptionOutcome::Foreign),
            }
            Ok(OptionOutcome::Taken)
        })?;
        let (mut left, mut separated) = (Vec::new(), false);
        let mut arguments = rest.iter().cloned();
        left.extend(arguments.next());
        while let Some(word) = arguments.next() {
            match word.to_bytes() {
                b"-o" if !separated => {
                    left.push(word);
                    left.extend(arguments.next());
                }
                b"--" if !separated => separated = true,
                b"-h" | b"--help" if !separated => line.help = true,
                b"-ho" if !separated && !is_three => line.help = true,
                b"-V" | b"--version" if !separated => line.version = true,
                b"-s" if !separated => line.single = true,
                b"-f" if !separated => line.foreground = true,
                b"-d" | b"--debug" if !separated => {
                    (line.debug, line.foreground) = (true, true);
                    left.push(word);
                }
                [b'-', _, ..] if !separated => left.push(word),
                _ if line.mountpoint.is_none() => line.mountpoint = Some(resolve(&word)?),
                _ => return Err(format!("fuse: invalid argument `{}'", word.to_string_lossy())),
            }
        }
        if !line.has_subtype && !line.help && !line.version {
            add_subtype(&mut left);
        }
        Ok((line, left))
    }
}

fn refusal_message(option: &str) -> String {
    format!("fuse: invalid parameter in option `{option}'")
}

/// Adds the name of the program as the type of the mount.
fn add_subtype(words: &mut Vec<CString>) {
    let Some(program) = words.first() else { return };
    let name = program.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-".contains(byte);
    if !name.is_empty() && name.len() < 64 && name.iter().all(plain) {
        let option = [b"-osubtype=", name].concat();
        words.insert(1, CString::new(option).expect("a C string has no NUL"));
    }
}

/// The absolute path of a mount point, which stays right when the working directory becomes /.
fn resolve(word: &CStr) -> Result<CString, String> {
    if word.to_bytes().starts_with(b"/dev/fd/") {
        return Ok(word.to_owned());
    }
    // SAFETY: the argument is a string, and a null pointer lets realpath(3) allocate.
    let path = unsafe { libc::realpath(word.as_ptr(), null_mut()) };
    if path.is_null() {
        let reason = std::io::Error::last_os_error();
        return Err(format!("fuse: bad mount point `{}': {reason}", word.to_string_lossy()));
    }
    // SAFETY: realpath(3) has returned a string of malloc(3).
    unsafe {
        let owned = CStr::from_ptr(path).to_owned();
        libc::free(path.cast());
        Ok(owned)
    }
}

/// Parses `args`, and leaves the arguments of the mount and the library.
///
/// # Safety
///
/// `args` is a `struct fuse_args`.
unsafe fn parse_args(version: ApiVersion, args: *mut FuseArgs) -> Option<CommandLine> {
    // SAFETY: the caller's promise.
    unsafe {
        match CommandLine::parse(version, &words(args)) {
            Ok((line, left)) => {
                replace(args, &left);
                Some(line)
            }
            Err(message) => {
                error(&message);
                None
            }
        }
    }
}

fn allocate_copy(text: Option<&CString>) -> *mut c_char {
    // SAFETY: the argument is a string.
    text.map_or(null_mut(), |text| unsafe { libc::strdup(text.as_ptr()) })
}

/// Fills the fields of `opts` that programs before libfuse 3.12 know.
///
/// # Safety
///
/// `args` is a `struct fuse_args`, and `opts` has room for all fields but the last one.
pub unsafe extern "C" fn fuse_parse_cmdline_30(
    args: *mut FuseArgs,
    opts: *mut CmdlineOpts,
) -> c_int {
    // SAFETY: the caller's promise; the last field is not written.
    unsafe {
        let Some(line) = parse_args(ApiVersion::Three, args) else { return -1 };
        (*opts).singlethread = c_int::from(line.single);
        (*opts).foreground = c_int::from(line.foreground);
        (*opts).debug = c_int::from(line.debug);
        (*opts).nodefault_subtype = c_int::from(line.has_subtype);
        (*opts).mountpoint = allocate_copy(line.mountpoint.as_ref());
        (*opts).show_version = c_int::from(line.version);
        (*opts).show_help = c_int::from(line.help);
        (*opts).clone_fd = c_int::from(line.clone_fd);
        (*opts).max_idle_threads = line.max_idle_threads.unwrap_or(u32::MAX);
    }
    0
}

/// Fills all fields of `opts`.
///
/// # Safety
///
/// `args` is a `struct fuse_args`, and `opts` has room for all fields.
pub unsafe extern "C" fn fuse_parse_cmdline_312(
    args: *mut FuseArgs,
    opts: *mut CmdlineOpts,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        // The arguments are parsed once: the first parse leaves nothing of these options.
        let Ok((line, _)) = CommandLine::parse(ApiVersion::Three, &words(args)) else {
            return fuse_parse_cmdline_30(args, opts);
        };
        (*opts).max_threads = line.max_threads.unwrap_or(DEFAULT_THREADS);
        fuse_parse_cmdline_30(args, opts)
    }
}

/// The threads of a program that asks for no number.
pub const DEFAULT_THREADS: u32 = 10;

/// `fuse_parse_cmdline` of libfuse 2.
///
/// # Safety
///
/// `args` is a `struct fuse_args`; the others are null, or lead to variables.
pub unsafe extern "C" fn parse_cmdline_two(
    args: *mut FuseArgs,
    mountpoint: *mut *mut c_char,
    multithreaded: *mut c_int,
    foreground: *mut c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let Some(line) = parse_args(ApiVersion::Two, args) else { return -1 };
        if line.help {
            print_usage(&words(args), ApiVersion::Two);
            return -1;
        }
        if line.version {
            println!("FUSE library version: 2.9.9");
            return -1;
        }
        if !mountpoint.is_null() {
            mountpoint.write(allocate_copy(line.mountpoint.as_ref()));
        }
        if !multithreaded.is_null() {
            multithreaded.write(c_int::from(!line.single));
        }
        if !foreground.is_null() {
            foreground.write(c_int::from(line.foreground));
        }
    }
    0
}

/// Prints usage and options, to standard error for libfuse 2.
pub fn print_usage(words: &[CString], version: ApiVersion) {
    let name =
        words.first().map_or_else(Default::default, |name| name.to_string_lossy().into_owned());
    let text = format!(
        "usage: {name} mountpoint [options]\n\ngeneral options:\n    -o opt,[opt...]        options of the mount\n    \
         -h   --help            print help\n    -V   --version         print version\n\nFUSE options:\n{GENERAL}{}",
        help(version)
    );
    match version {
        ApiVersion::Two => eprint!("{text}"),
        ApiVersion::Three => print!("{text}"),
    }
}

const GENERAL: &str = "    -d   -o debug          foreground, with messages\n    -f                     foreground\n    \
                       -s                     one thread\n";

/// Prints the options of the command line.
pub extern "C" fn fuse_cmdline_help() {
    print!(
        "    -h   --help            print help\n    -V   --version         print version\n{GENERAL}    \
         -o clone_fd            a descriptor of the device for each thread (always)\n    \
         -o max_idle_threads    accepted; idle threads end by themselves\n    \
         -o max_threads         most threads\n"
    );
}

/// Prints the options of mount and library.
///
/// # Safety
///
/// No condition; the argument is not used.
pub unsafe extern "C" fn fuse_lib_help(_args: *mut FuseArgs) {
    print!("{}", help(ApiVersion::Three));
}

/// Prints the options of a mount.
pub extern "C" fn fuse_lowlevel_help() {
    print!("{}", help(ApiVersion::Three));
}

/// Prints the versions.
pub extern "C" fn fuse_lowlevel_version() {
    println!("using FUSE kernel interface version 7.38");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(words: &[&str]) -> Vec<CString> {
        words.iter().map(|word| CString::new(*word).unwrap()).collect()
    }

    fn parse_words(words: &[&str]) -> (CommandLine, Vec<CString>) {
        CommandLine::parse(ApiVersion::Three, &list(words)).unwrap()
    }

    #[test]
    fn options_of_the_command_line_are_taken_and_the_others_left() {
        let (line, left) =
            parse_words(&["/bin/p", "-f", "-o", "max_threads=3,ro,clone_fd", "/", "-s"]);
        let mountpoint = Some(c"/".to_owned());
        let expected = CommandLine {
            single: true,
            foreground: true,
            clone_fd: true,
            mountpoint,
            max_threads: Some(3),
            ..CommandLine::default()
        };
        assert_eq!(line, expected);
        assert_eq!(left, list(&["/bin/p", "-osubtype=p", "-o", "ro"]));
    }

    #[test]
    fn a_given_subtype_and_debugging_stay_for_the_mount() {
        let (line, left) = parse_words(&["p", "-osubtype=x", "-d", "/dev/fd/7"]);
        assert!(line.has_subtype && line.debug && line.foreground);
        assert_eq!(line.mountpoint, Some(c"/dev/fd/7".to_owned()));
        assert_eq!(left, list(&["p", "-o", "subtype=x", "-d"]));
    }

    #[test]
    fn wrong_mount_points_are_errors_that_name_them() {
        let refused =
            |words: &[&str]| CommandLine::parse(ApiVersion::Two, &list(words)).unwrap_err();
        assert_eq!(refused(&["p", "/", "/x"]), "fuse: invalid argument `/x'");
        assert!(
            refused(&["p", "/nonexistent"]).starts_with("fuse: bad mount point `/nonexistent'")
        );
        assert!(refused(&["p", "-o"]).contains("missing argument"));
    }
}
