//! Kinds of file systems, described where they are implemented.
//!
//! A *source* names a file system in text: `KIND:REST`, such as `passthrough:/srv`, with options
//! beside it. Each backend describes its kinds by a [`SourceDescription`]: the name, the help text,
//! the options, and the function that opens a source. Programs list the kinds that they link and
//! know nothing else about them.
//!
//! It has no list of kinds (programs have these), and no parser of command lines.

mod frontend;
mod images;
mod value;

pub use frontend::{CallingThreads, FrontendProperties, GrantedEffects, LockPlace};
pub use images::{
    CheckResult, DumpCell, DumpTable, GrowthResult, ImageGrowth, ImageOperations, NewImage,
    NewestChanges, NoWatch, SourceImage, WorkWatch,
};
pub use value::{ChoiceWord, OptionValue, bytes, seconds};

use std::ffi::OsStr;
use std::fmt;
use std::sync::Arc;

use crate::FileSystem;

/// The facts of a kind that programs show and decide by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceFacts {
    /// The word before the colon of a source. Lower case, unique among the kinds of a program.
    pub name: &'static str,
    /// The form of a source in help texts: `passthrough:DIR`.
    pub form: &'static str,
    /// One line of help.
    pub help: &'static str,
    /// The meaning of the text after the colon.
    pub rest: SourceRest,
    /// How several processes can use one source.
    pub sharing: SourceSharing,
    /// The file system does its own I/O by io_uring(7), also after it is open: a sandbox must
    /// permit the calls of rings.
    pub rings: bool,
    /// The file system connects to other machines, also after it is open: a sandbox must permit
    /// sockets.
    pub network: bool,
    /// The files that the file system opens by their names after it is open: a sandbox must leave
    /// them visible.
    pub files: FileAccess,
}

/// Files that a file system opens by their names after it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileAccess {
    /// None: it has the descriptors that it needs.
    None,
    /// Opens files in the directory that the text after the colon names, from descriptors in it.
    InDirectory,
    /// Any: a library that it uses opens configurations and logs, or another program serves it.
    Any,
}

/// The meaning of the text after the colon of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceRest {
    /// A path. It must not be empty, and a relative path is made absolute: the process that serves
    /// a mount works in `/`.
    Path,
    /// Any text, passed on as it is.
    Text,
    /// Nothing may follow.
    Nothing,
}

/// How several processes can use one source at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceSharing {
    /// All state is in a directory of the kernel, named by the text after the colon. Every process
    /// opens the source by itself.
    InDirectory,
    /// The state is in the process that opened the source. Others reach it through a server in that
    /// process.
    NeedsServer,
    /// Another process serves the file system on a socket, named by the text after the colon. Every
    /// process connects by itself.
    Remote,
    /// The state is outside of the process, and processes that open the same source coordinate by
    /// themselves.
    Shared,
}

/// Why a source could not be opened. The text names the object and the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceOpenError {
    /// The text is wrong.
    Usage(String),
    /// The text is right, but opening failed.
    Failed(String),
    /// The text is right, but another process uses the object (`EBUSY`).
    Busy(String),
    /// A [`WorkWatch`] has ended the work.
    Interrupted(String),
}

impl SourceOpenError {
    /// Opening failed with `error`.
    pub fn from_error(error: impl fmt::Display) -> Self {
        SourceOpenError::Failed(error.to_string())
    }
}

impl fmt::Display for SourceOpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SourceOpenError::Usage(text)
            | SourceOpenError::Failed(text)
            | SourceOpenError::Busy(text)
            | SourceOpenError::Interrupted(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for SourceOpenError {}

/// The result of parsing or opening a source.
pub type SourceResult<T = ()> = std::result::Result<T, SourceOpenError>;

/// A kind of file system that a program can open by name. Backends implement it by a
/// [`SourceDescription`].
pub trait SourceKind: Sync {
    /// The facts.
    fn facts(&self) -> &SourceFacts;

    /// The options, for help texts and for suggestions.
    fn options(&self) -> Vec<OptionHelp>;

    /// Checks `options`, each `NAME` or `NAME=VALUE`, without opening anything.
    ///
    /// # Errors
    ///
    /// [`SourceOpenError::Usage`] for an unknown option, and for a value that the option cannot
    /// have.
    fn check(&self, options: &[String]) -> SourceResult;

    /// Opens the source `rest` for `frontend`, with `options` in their order: later ones override
    /// earlier ones.
    ///
    /// # Errors
    ///
    /// [`SourceOpenError::Usage`] as for [`check`](SourceKind::check), and for a `rest` of the
    /// wrong form; [`SourceOpenError::Failed`] when the file system cannot be opened, and
    /// [`SourceOpenError::Busy`] when another process uses it.
    fn open(
        &self,
        rest: &OsStr,
        frontend: &FrontendProperties,
        options: &[String],
    ) -> SourceResult<Arc<dyn FileSystem>>;

    /// Operations on unmounted file systems of this kind. `None` if they do not lie in an image.
    fn images(&self) -> Option<&'static dyn ImageOperations> {
        None
    }
}

/// An option of a kind, as help texts show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptionHelp {
    /// The name.
    pub name: &'static str,
    /// The name with the form of its value: `size=BYTES`.
    pub form: String,
    /// One line of help.
    pub help: &'static str,
}

/// A kind whose settings have the type `S`.
pub struct SourceDescription<S: 'static> {
    /// The facts.
    pub about: SourceFacts,
    /// All options, in the order of the help text.
    pub options: &'static [SourceOption<S>],
    /// The settings without options, for this frontend.
    pub defaults: fn(&FrontendProperties) -> S,
    /// Opens the text after the colon.
    pub open: fn(&OsStr, S) -> SourceResult<Arc<dyn FileSystem>>,
    /// Operations on images, see [`SourceKind::images`].
    pub images: Option<&'static dyn ImageOperations>,
}

/// An option, and its effect on settings of type `S`.
pub struct SourceOption<S: 'static> {
    /// The name.
    pub name: &'static str,
    /// One line of help, less than 100 bytes.
    pub help: &'static str,
    /// The form of the value, and its effect.
    pub value: OptionValue<S>,
}

impl<S> SourceOption<S> {
    /// An option.
    pub const fn new(name: &'static str, value: OptionValue<S>, help: &'static str) -> Self {
        SourceOption { name, help, value }
    }

    fn help(&self) -> OptionHelp {
        let form = match self.value.form() {
            Some(value) => format!("{}={value}", self.name),
            None => self.name.to_owned(),
        };
        OptionHelp { name: self.name, form, help: self.help }
    }
}

impl<S> SourceDescription<S> {
    /// The settings for `frontend` after `options`.
    ///
    /// # Errors
    ///
    /// [`SourceOpenError::Usage`], see [`SourceKind::check`].
    pub fn settings(
        &self,
        frontend: &FrontendProperties,
        options: &[impl AsRef<str>],
    ) -> SourceResult<S> {
        let mut settings = (self.defaults)(frontend);
        for option in options {
            let option = option.as_ref();
            let (name, value) = match option.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (option, None),
            };
            match self.options.iter().find(|known| known.name == name) {
                Some(known) => known.value.apply(&mut settings, name, value)?,
                None => return Err(self.unknown_option_error(name)),
            }
        }
        Ok(settings)
    }

    fn unknown_option_error(&self, name: &str) -> SourceOpenError {
        let kind = self.about.name;
        let names: Vec<_> = self.options.iter().map(|known| known.name).collect();
        let known = match names.is_empty() {
            true => String::new(),
            false => format!(", {}", names.join(", ")),
        };
        SourceOpenError::Usage(format!(
            "there is no option {name} of {kind}: known are ro, rw{known}"
        ))
    }
}

impl<S> SourceKind for SourceDescription<S> {
    fn facts(&self) -> &SourceFacts {
        &self.about
    }

    fn options(&self) -> Vec<OptionHelp> {
        self.options.iter().map(SourceOption::help).collect()
    }

    fn check(&self, options: &[String]) -> SourceResult {
        self.settings(&FrontendProperties::default(), options).map(drop)
    }

    fn open(
        &self,
        rest: &OsStr,
        frontend: &FrontendProperties,
        options: &[String],
    ) -> SourceResult<Arc<dyn FileSystem>> {
        (self.open)(rest, self.settings(frontend, options)?)
    }

    fn images(&self) -> Option<&'static dyn ImageOperations> {
        self.images
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct TestSettings {
        size: u64,
        quiet: bool,
    }

    static KIND: SourceDescription<TestSettings> = SourceDescription {
        about: SourceFacts {
            name: "test",
            form: "test:",
            help: "nothing",
            rest: SourceRest::Nothing,
            sharing: SourceSharing::NeedsServer,
            rings: false,
            network: false,
            files: FileAccess::None,
        },
        options: &[
            SourceOption::new(
                "size",
                OptionValue::Size(1, 1 << 40, |s: &mut TestSettings, n| s.size = n),
                "bytes",
            ),
            SourceOption::new(
                "quiet",
                OptionValue::Flag(|s: &mut TestSettings| s.quiet = true),
                "no output",
            ),
        ],
        defaults: |frontend| TestSettings { size: 7, quiet: frontend.writeback },
        open: |_, _| Err(SourceOpenError::from_error("nothing to open")),
        images: None,
    };

    #[test]
    fn later_options_override_earlier_ones_and_the_frontend() {
        let of = |frontend: &FrontendProperties, options: &[&str]| KIND.settings(frontend, options);
        let frontend = FrontendProperties { writeback: true, ..FrontendProperties::default() };
        assert_eq!(of(&frontend, &[]), Ok(TestSettings { size: 7, quiet: true }));
        let after = of(&FrontendProperties::default(), &["size=1K", "quiet", "size=2K"]);
        assert_eq!(after, Ok(TestSettings { size: 2048, quiet: true }));
    }

    #[test]
    fn a_wrong_option_is_refused_with_the_right_ones() {
        let error = |option: &str| KIND.check(&[option.to_owned()]).unwrap_err().to_string();
        assert!(error("sice=1").ends_with("known are ro, rw, size, quiet"));
        assert!(error("size").contains("write size=BYTES"));
        assert!(error("quiet=1").contains("takes no value"));
        assert!(error("size=0").contains("bytes (also 64K, 1M, 2G) from 1 to"));
    }

    #[test]
    fn help_has_the_form_of_the_value() {
        let forms: Vec<_> =
            SourceKind::options(&KIND).into_iter().map(|option| option.form).collect();
        assert_eq!(forms, ["size=BYTES", "quiet"]);
    }
}
