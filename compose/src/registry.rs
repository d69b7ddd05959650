//! The kinds of a program, and sources: parsing, opening, help.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use defuse_fs::FileSystem;
use defuse_fs::layer::ReadOnlyLayer;
use defuse_fs::source::{SourceKind, SourceRest, SourceSharing};

use crate::settings::{SourceSettings, split};
use crate::{SourceOpenError, SourceResult};

/// The kinds of sources that a program links. Each program has one, in one place.
#[derive(Clone, Copy)]
pub struct SourceRegistry {
    lists: &'static [&'static [&'static dyn SourceKind]],
}

impl SourceRegistry {
    /// The registry of all kinds in `lists`.
    pub const fn new(lists: &'static [&'static [&'static dyn SourceKind]]) -> Self {
        SourceRegistry { lists }
    }

    /// All kinds, in the order of the help text.
    pub fn kinds(&self) -> impl Iterator<Item = &'static dyn SourceKind> + use<> {
        self.lists.iter().flat_map(|list| list.iter().copied())
    }

    /// Parses `KIND:REST`.
    ///
    /// # Errors
    ///
    /// [`SourceOpenError::Usage`] for a text without a kind, for an unknown kind, and for a `REST`
    /// that the kind cannot have.
    pub fn parse(&self, text: &OsStr) -> SourceResult<ParsedSource> {
        let bytes = text.as_bytes();
        let Some(colon) = bytes.iter().position(|&byte| byte == b':') else {
            return Err(self.missing_kind_error(text));
        };
        let name = String::from_utf8_lossy(&bytes[..colon]);
        let Some(kind) = self.kinds().find(|kind| kind.facts().name == name) else {
            return Err(self.unknown_kind(&name));
        };
        let rest = normalize_rest(kind, OsStr::from_bytes(&bytes[colon + 1..]))?;
        Ok(ParsedSource { kind, rest })
    }

    /// Opens the file system that `text` names: a source, then options after commas. A backslash
    /// makes a comma part of the source or option. The options are added to `settings`.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`parse`](SourceRegistry::parse) and [`SourceKind::open`], and with
    /// [`SourceOpenError::Usage`] for a text that is not valid UTF-8.
    pub fn open(&self, text: &OsStr, settings: SourceSettings) -> SourceResult<OpenSource> {
        let (source, settings) = self.parse_with_options(text, settings)?;
        let fs = source.open(&settings)?;
        Ok(OpenSource { source, settings, fs })
    }

    /// Parses a source with options after commas, which are added to `settings`.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`open`](SourceRegistry::open), but for errors of options, which
    /// are not checked.
    pub fn parse_with_options(
        &self,
        text: &OsStr,
        mut settings: SourceSettings,
    ) -> SourceResult<(ParsedSource, SourceSettings)> {
        let text = text.to_str().ok_or_else(|| {
            let shown = text.display();
            SourceOpenError::Usage(format!(
                "source {shown} is not valid UTF-8, as options after it must be"
            ))
        })?;
        let mut parts = split(text).into_iter();
        let source = self.parse(OsStr::new(&parts.next().unwrap_or_default()))?;
        let options: Vec<String> = parts.collect();
        check_commas(&source, &options)?;
        options.into_iter().for_each(|option| settings.add(option));
        Ok((source, settings))
    }

    /// The kinds of sources for help texts, one a line.
    pub fn help(&self) -> String {
        let about = self.kinds().map(|kind| kind.facts());
        about.map(|about| format!("  {:<20} {}\n", about.form, about.help)).collect()
    }

    fn missing_kind_error(&self, text: &OsStr) -> SourceOpenError {
        let shown = text.display();
        let is_path = Path::new(text).exists() || text.as_bytes().contains(&b'/');
        let of_directories =
            |kind: &&dyn SourceKind| kind.facts().sharing == SourceSharing::InDirectory;
        if let Some(kind) = self.kinds().find(of_directories).filter(|_| is_path) {
            let name = kind.facts().name;
            return SourceOpenError::Usage(format!(
                "source {shown} has no type: to serve this directory, write {name}:{shown}"
            ));
        }
        let known = self.forms();
        SourceOpenError::Usage(format!(
            "source {shown} has no type: write TYPE:…, where TYPE is {known}"
        ))
    }

    fn unknown_kind(&self, name: &str) -> SourceOpenError {
        let known = self.forms();
        SourceOpenError::Usage(format!("there are no sources of type {name:?}: known are {known}"))
    }

    fn forms(&self) -> String {
        self.kinds().map(|kind| kind.facts().form).collect::<Vec<_>>().join(", ")
    }
}

/// Refuses options that a source does not have whose text is a command, and shows how its commas
/// are written.
fn check_commas(source: &ParsedSource, options: &[String]) -> SourceResult {
    let about = source.kind.facts();
    let is_known = |option: &String| {
        let name = option.split('=').next().unwrap_or_default();
        ["ro", "rw"].contains(&name) || source.kind.options().iter().any(|known| known.name == name)
    };
    let Some(unknown) = options.iter().find(|option| !is_known(option)) else { return Ok(()) };
    if about.rest != SourceRest::Text {
        return Ok(());
    }
    let (name, rest) = (about.name, source.rest.display());
    let command = [rest.to_string(), options.join("\\,")].join("\\,");
    Err(SourceOpenError::Usage(format!(
        "there is no option {unknown} of {name}: if it belongs to the command, write its commas with a backslash, \
         '{name}:{command}'"
    )))
}

/// Checks the text after the colon, and makes a path absolute.
fn normalize_rest(kind: &dyn SourceKind, rest: &OsStr) -> SourceResult<OsString> {
    let about = kind.facts();
    match about.rest {
        SourceRest::Path if rest.is_empty() => {
            let (name, form) = (about.name, about.form);
            Err(SourceOpenError::Usage(format!("source {name}: names no path: {form}")))
        }
        // A device of a driver has no path.
        SourceRest::Path if defuse_block::driver_of(rest).is_some() => Ok(rest.to_os_string()),
        SourceRest::Path => Ok(absolute(rest)),
        SourceRest::Nothing if !rest.is_empty() => {
            let (name, rest) = (about.name, rest.display());
            Err(SourceOpenError::Usage(format!(
                "source {name}:{rest}: nothing may follow the colon: write {name}: and options apart"
            )))
        }
        SourceRest::Nothing | SourceRest::Text => Ok(rest.to_os_string()),
    }
}

/// A daemon works in `/`, where a relative path would mean something else.
fn absolute(path: &OsStr) -> OsString {
    std::path::absolute(path).map_or_else(|_| path.to_os_string(), Into::into)
}

/// While it is true, changes of a read-only file system are let through.
pub type WriteSwitch = Option<Arc<AtomicBool>>;

/// A source, parsed.
#[derive(Clone)]
pub struct ParsedSource {
    /// The kind.
    pub kind: &'static dyn SourceKind,
    /// The text after the colon; absolute if it is a path.
    pub rest: OsString,
}

/// A source that was opened.
pub struct OpenSource {
    /// The source.
    pub source: ParsedSource,
    /// The settings, with the options of the text.
    pub settings: SourceSettings,
    /// The file system.
    pub fs: Arc<dyn FileSystem>,
}

impl ParsedSource {
    /// Opens the file system. A read-only one refuses changes by itself, because the flag of a
    /// kernel mount can be removed while it is mounted.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`SourceKind::open`].
    pub fn open(&self, settings: &SourceSettings) -> SourceResult<Arc<dyn FileSystem>> {
        self.open_with_switch(settings).map(|(fs, _)| fs)
    }

    /// [`open`](ParsedSource::open), with the switch of the layer that refuses changes
    /// ([`ReadOnlyLayer::switch`]), if there is one. A file system that refuses them by itself
    /// ([`Caps::read_only`]) has none.
    ///
    /// [`Caps::read_only`]: defuse_fs::Caps::read_only
    pub fn open_with_switch(
        &self,
        settings: &SourceSettings,
    ) -> SourceResult<(Arc<dyn FileSystem>, WriteSwitch)> {
        let mut frontend = settings.frontend.clone();
        frontend.read_only |= settings.read_only;
        let fs = self.kind.open(&self.rest, &frontend, &settings.options)?;
        if !settings.read_only || fs.caps().read_only {
            return Ok((fs, None));
        }
        let fs = ReadOnlyLayer::new(fs);
        let switch = fs.switch();
        Ok((Arc::new(fs), Some(switch)))
    }

    /// `KIND:REST`, with an absolute path.
    pub fn text(&self) -> OsString {
        let mut bytes = self.kind.facts().name.as_bytes().to_vec();
        bytes.push(b':');
        bytes.extend_from_slice(self.rest.as_bytes());
        OsString::from_vec(bytes)
    }

    /// How several processes can use the source.
    pub fn sharing(&self) -> SourceSharing {
        self.kind.facts().sharing
    }

    /// The directory of the kernel that has all state of the source; `None` for other sources.
    pub fn directory(&self) -> Option<&Path> {
        (self.sharing() == SourceSharing::InDirectory).then(|| Path::new(&self.rest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{IN_OWN_PROGRAMS, IN_PROCESS};

    static ALL: SourceRegistry = SourceRegistry::new(&[IN_PROCESS, IN_OWN_PROGRAMS]);

    fn error(text: &str) -> String {
        ALL.parse(OsStr::new(text)).err().unwrap().to_string()
    }

    #[test]
    fn sources_have_a_kind() {
        let source = ALL.parse(OsStr::new("passthrough:/srv/a:b")).unwrap();
        assert_eq!(source.text(), "passthrough:/srv/a:b");
        assert_eq!(source.directory(), Some(Path::new("/srv/a:b")));
        let relative = ALL.parse(OsStr::new("passthrough:x")).unwrap();
        assert!(Path::new(&relative.rest).is_absolute());
        assert_eq!(ALL.parse(OsStr::new("memory:")).unwrap().directory(), None);
    }

    #[test]
    fn a_text_is_a_source_with_options() {
        let open = |text: &str| ALL.open(OsStr::new(text), SourceSettings::default());
        let opened = open("memory:,size=1M,ro").unwrap();
        assert_eq!(opened.settings.options, ["size=1M"]);
        assert!(opened.fs.caps().read_only && opened.settings.read_only);
        let cx = defuse_fs::Context::new(Default::default());
        assert_eq!(opened.fs.statfs(&cx, defuse_fs::Ino::ROOT).unwrap().blocks, 256);
        let message = |text| open(text).err().unwrap().to_string();
        assert!(message("memory:,sice=1").contains("known are ro, rw, size"));
        assert!(message("memory:,handles=on").contains("no option handles of memory"));
        assert!(message("memory:,size").contains("write size=BYTES"));
    }

    #[test]
    fn the_commas_of_a_command_are_shown_with_their_escape() {
        let parse =
            |text: &str| ALL.parse_with_options(OsStr::new(text), SourceSettings::default());
        let error = parse("fuse:overlay -o lower=a,upper=b,work=c").err().unwrap().to_string();
        assert!(error.contains("no option upper=b of fuse"), "{error}");
        let (_, written) = error.split_once('\'').unwrap();
        assert_eq!(written, "fuse:overlay -o lower=a\\,upper=b\\,work=c'");
        let (source, settings) = parse(&format!("{},ro", written.trim_end_matches('\''))).unwrap();
        assert_eq!(source.rest, "overlay -o lower=a,upper=b,work=c");
        assert!(settings.read_only && settings.options.is_empty());
    }

    #[test]
    fn mistakes_name_the_next_step() {
        assert!(error("/tmp").ends_with("write passthrough:/tmp"));
        assert!(error("memory").contains("known") || error("memory").contains("memory:"));
        assert!(error("nfs:server").contains("passthrough:DIR, memory:"));
        assert!(error("passthrough:").contains("names no path"));
        assert!(error("memory:x").contains("nothing may follow the colon"));
    }

    #[test]
    fn no_two_kinds_have_one_name_and_each_fits_a_line_of_help() {
        let mut names: Vec<_> = ALL.kinds().map(|kind| kind.facts().name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        for kind in ALL.kinds() {
            let about = kind.facts();
            assert!(about.form.starts_with(&format!("{}:", about.name)), "{}", about.form);
            for option in kind.options() {
                assert!(!option.help.is_empty() && option.help.len() < 100, "{}", option.name);
            }
        }
    }
}
