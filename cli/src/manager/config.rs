//! The configuration of a manager: TOML, in which each mistake has its place.

use std::path::{Path, PathBuf};
use std::time::Duration;

use defuse_cache::PolicyKind;
use defuse_compose::{ParsedSource, SourceSettings};
use defuse_fs::namespace::{Namespace, NamespaceError};
use defuse_shared::PagedOptions;
use defuse_socket::ServerOptions;
use serde::Deserialize;
use toml::Spanned;

use crate::config_text::ConfigText;
use crate::error::{CommandFailure, Result};
use crate::sources::SOURCES;
use crate::{images, paths};

/// The option of a source with a thread for its I/O.
pub const WORKER: &str = "worker";

/// The time after which an application that sends nothing counts as gone.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// A configuration whose values have been checked.
pub struct ManagerConfig {
    text: ConfigText,
    pub socket: PathBuf,
    pub admit: Vec<u32>,
    pub pages: PagedOptions,
    pub max_connections: usize,
    pub max_connections_of_user: Option<usize>,
    pub dead_after: Option<Duration>,
    /// The time for an application that has a device to give a sign of life.
    pub answer_within: Duration,
    /// In place of /sys.
    pub sysfs: Option<PathBuf>,
    pub devices: Vec<ConfiguredDevice>,
}

/// One of the file systems.
pub struct ConfiguredDevice {
    /// The path in the tree, from `/` on.
    pub path: String,
    pub source: ParsedSource,
    pub settings: SourceSettings,
    /// Applications may bind it: applications of these users, and of root and the user of the
    /// manager.
    pub bind: Option<Vec<u32>>,
    /// The place of the source in the configuration.
    pub place: usize,
}

impl ConfiguredDevice {
    /// The source as text.
    pub fn text(&self) -> String {
        self.source.text().to_string_lossy().into_owned()
    }

    /// The path without its first slash.
    pub fn path_of_names(&self) -> &str {
        self.path.strip_prefix('/').unwrap_or(&self.path)
    }
}

/// The file as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ConfigFile {
    socket: Spanned<PathBuf>,
    #[serde(default)]
    admit: Vec<u32>,
    cache: Option<Spanned<String>>,
    eviction: Option<Spanned<String>>,
    max_connections: Option<Spanned<usize>>,
    max_connections_of_user: Option<Spanned<usize>>,
    dead_after: Option<Spanned<u64>>,
    answer_within: Option<Spanned<u64>>,
    sysfs: Option<PathBuf>,
    #[serde(default)]
    device: Vec<ConfigFileDevice>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigFileDevice {
    path: Spanned<String>,
    source: Spanned<String>,
    worker: Option<Spanned<bool>>,
    bind: Option<Spanned<Vec<u32>>>,
    #[serde(default)]
    options: Vec<Spanned<String>>,
}

impl ManagerConfig {
    /// Reads and checks `file`. Each failure names the file, the line and the key.
    pub fn read(file: &Path) -> Result<ManagerConfig> {
        ManagerConfig::parse(ConfigText::read(file, "defuse manager --help")?)
    }

    fn parse(text: ConfigText) -> Result<ManagerConfig> {
        let written: ConfigFile = text.parse()?;
        let mut config = ManagerConfig {
            text,
            socket: PathBuf::new(),
            admit: Vec::new(),
            pages: PagedOptions::default(),
            max_connections: ServerOptions::default().max_connections,
            max_connections_of_user: None,
            dead_after: None,
            answer_within: ANSWER_WITHIN,
            sysfs: None,
            devices: Vec::new(),
        };
        config.take(written)?;
        Ok(config)
    }

    fn take(&mut self, written: ConfigFile) -> Result {
        let wrong =
            |place: usize, why: String| self.locate_failure(place, &CommandFailure::Usage(why));
        if written.socket.get_ref().as_os_str().is_empty() {
            return Err(wrong(written.socket.span().start, "write the path of a socket".into()));
        }
        let mut pages = self.pages;
        if let Some(cache) = &written.cache {
            let place = cache.span().start;
            pages.bytes = images::cache_size(cache.get_ref()).map_err(|why| wrong(place, why))?;
        }
        if let Some(eviction) = &written.eviction {
            let place = eviction.span().start;
            pages.policy =
                PolicyKind::from_name(eviction.get_ref()).map_err(|why| wrong(place, why))?;
        }
        for most in [&written.max_connections, &written.max_connections_of_user] {
            if let Some(none) = most.as_ref().filter(|most| *most.get_ref() == 0) {
                return Err(wrong(none.span().start, "write a number from 1 on".into()));
            }
        }
        for seconds in [&written.dead_after, &written.answer_within] {
            if let Some(none) = seconds.as_ref().filter(|seconds| *seconds.get_ref() == 0) {
                return Err(wrong(none.span().start, "write seconds from 1 on".into()));
            }
        }
        for bind in written.device.iter().filter_map(|device| device.bind.as_ref()) {
            let own = [0, rustix::process::geteuid().as_raw()];
            let may = |uid: &u32| own.contains(uid) || written.admit.contains(uid);
            if let Some(uid) = bind.get_ref().iter().find(|uid| !may(uid)) {
                let why = format!("user {uid} may not connect: add it to admit, too");
                return Err(wrong(bind.span().start, why));
            }
        }
        if written.device.is_empty() {
            return Err(wrong(0, "there is no [[device]]: add one with path and source".into()));
        }
        let devices: Vec<ConfiguredDevice> =
            written.device.iter().map(|one| self.device(one)).collect::<Result<_>>()?;
        let names = devices.iter().map(ConfiguredDevice::path_of_names);
        Namespace::check(names).map_err(|unfit| self.unfit_error(unfit, &written.device))?;
        self.socket = paths::absolute(written.socket.get_ref());
        self.admit = written.admit;
        self.pages = pages;
        self.max_connections =
            written.max_connections.map_or(self.max_connections, Spanned::into_inner);
        self.max_connections_of_user = written.max_connections_of_user.map(Spanned::into_inner);
        self.dead_after = written.dead_after.map(|after| Duration::from_secs(after.into_inner()));
        let within = written.answer_within;
        self.answer_within =
            within.map_or(ANSWER_WITHIN, |within| Duration::from_secs(within.into_inner()));
        self.sysfs = written.sysfs.as_deref().map(paths::absolute);
        self.devices = devices;
        Ok(())
    }

    fn device(&self, written: &ConfigFileDevice) -> Result<ConfiguredDevice> {
        let place = written.source.span().start;
        let source = SOURCES.parse(written.source.get_ref().as_ref());
        let source = source.map_err(|error| self.locate_failure(place, &error.into()))?;
        let mut settings = SourceSettings::default();
        for option in &written.options {
            let (place, option) = (option.span().start, option.get_ref().clone());
            match option.as_str() {
                "ro" => settings.read_only = true,
                "rw" => settings.read_only = false,
                _ => {
                    let checked = source.kind.check(std::slice::from_ref(&option));
                    checked.map_err(|error| self.locate_failure(place, &error.into()))?;
                    settings.options.push(option);
                }
            }
        }
        let has_worker = source.kind.options().iter().any(|option| option.name == WORKER);
        match &written.worker {
            Some(worker) if *worker.get_ref() && !has_worker => {
                let why =
                    format!("sources of type {} do no I/O of their own", source.kind.facts().name);
                return Err(self.locate_failure(worker.span().start, &CommandFailure::Usage(why)));
            }
            worker if has_worker && worker.as_ref().is_none_or(|worker| *worker.get_ref()) => {
                settings.options.push(WORKER.to_owned());
            }
            _ => {}
        }
        if let Some(bind) = written.bind.as_ref().filter(|_| source.kind.images().is_none()) {
            let why = format!(
                "sources of type {} are no devices: an application cannot have one alone",
                source.kind.facts().name
            );
            return Err(self.locate_failure(bind.span().start, &CommandFailure::Usage(why)));
        }
        let (path, bind) = (written.path.get_ref(), written.bind.as_ref());
        let path = format!("/{}", path.strip_prefix('/').unwrap_or(path));
        let bind = bind.map(|bind| bind.get_ref().clone());
        Ok(ConfiguredDevice { path, source, settings, bind, place })
    }

    fn unfit_error(&self, unfit: NamespaceError, devices: &[ConfigFileDevice]) -> CommandFailure {
        let place = |index: usize| devices[index].path.span().start;
        let path = |index: usize| devices[index].path.get_ref();
        let (place, why) = match unfit {
            NamespaceError::Path(index) => {
                let why =
                    "is not the path of a directory in the tree: write it as /fast or /data/one";
                (place(index), format!("{:?} {why}", path(index)))
            }
            NamespaceError::Below(index, other) => {
                let why = "file systems do not lie in each other: choose another path";
                (place(index), format!("{:?} is in {:?}, and {why}", path(index), path(other)))
            }
            NamespaceError::TooMany => {
                (place(Namespace::MOST), format!("there are more than {} devices", Namespace::MOST))
            }
        };
        self.locate_failure(place, &CommandFailure::Usage(why))
    }

    /// The failure with file, line, and the key in this line.
    pub fn locate_failure(&self, place: usize, failure: &CommandFailure) -> CommandFailure {
        self.text.locate_failure(place, failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ManagerConfig> {
        ManagerConfig::parse(ConfigText::new(Path::new("/etc/m.toml"), text.to_owned()))
    }

    #[test]
    fn every_key_reaches_its_setting() {
        let text = r#"
            socket = "/run/m"
            admit = [5, 6]
            cache = "2M"
            eviction = "lru"
            max-connections = 9
            max-connections-of-user = 2
            dead-after = 30
            answer-within = 4
            [[device]]
            path = "/a"
            source = "memory:"
            options = ["size=1M", "ro"]
            [[device]]
            path = "b/c"
            source = "uhs:/srv/image"
            [[device]]
            path = "d"
            source = "uhs:/srv/other"
            worker = false
            bind = [5]
        "#;
        let config = parse(text).unwrap();
        assert_eq!((config.socket, config.admit), (PathBuf::from("/run/m"), vec![5, 6]));
        assert_eq!((config.pages.bytes, config.pages.policy.name()), (2 << 20, "lru"));
        assert_eq!((config.max_connections, config.max_connections_of_user), (9, Some(2)));
        assert_eq!(config.dead_after, Some(Duration::from_secs(30)));
        assert_eq!(config.answer_within, Duration::from_secs(4));
        let [a, b, d] = &config.devices[..] else { panic!() };
        assert_eq!((&a.bind, &d.bind, d.path.as_str()), (&None, &Some(vec![5]), "/d"));
        assert_eq!((a.path_of_names(), a.text().as_str()), ("a", "memory:"));
        assert!(a.settings.read_only && a.settings.options == ["size=1M"]);
        assert_eq!((b.path_of_names(), b.text().as_str()), ("b/c", "uhs:/srv/image"));
        // Where a source can have a worker, it has one.
        assert_eq!(
            (&b.settings.options[..], d.settings.options.len()),
            (&["worker".to_owned()][..], 0)
        );
    }

    #[test]
    fn a_mistake_has_its_file_line_and_key() {
        let device = |lines: &str| format!("socket = '/s'\n[[device]]\n{lines}");
        let two = |path: &str| {
            let device = |path| format!("[[device]]\nsource = 'memory:'\npath = '{path}'\n");
            format!("socket = '/s'\n{}{}", device("/a/b"), device(path))
        };
        for (text, says) in [
            (
                "sockets = '/s'".to_owned(),
                "1: sockets: unknown field `sockets`, expected one of `socket`",
            ),
            ("# nothing\nadmit = []".to_owned(), "missing field `socket`"),
            ("socket = 7".to_owned(), "1: socket: invalid type"),
            ("socket = '/s'\nadmit = ['me']".to_owned(), "2: admit: invalid type"),
            ("socket = '/s'\ncache = '7X'".to_owned(), "2: cache: write bytes"),
            ("socket = '/s'\ncache = '1K'".to_owned(), "2: cache: the least is 1M"),
            ("socket = '/s'\neviction = 'mru'".to_owned(), "2: eviction: "),
            ("socket = '/s'\nmax-connections = 0".to_owned(), "2: max-connections: write a number"),
            ("socket = '/s'\ndead-after = 0".to_owned(), "2: dead-after: write seconds"),
            ("socket = '/s'\nanswer-within = 0".to_owned(), "2: answer-within: write seconds"),
            (
                device("path = '/a'\nsource = 'uhs:/i'\nbind = [7]"),
                "5: bind: user 7 may not connect: add it to admit",
            ),
            (
                device("path = '/a'\nsource = 'memory:'\nbind = []"),
                "5: bind: sources of type memory are no devices",
            ),
            ("socket = '/s'".to_owned(), "there is no [[device]]"),
            ("socket = '/s'\nsocket = '/t'".to_owned(), "2: socket: duplicate key"),
            ("socket = ".to_owned(), "1: socket: "),
            (device("path = '/a'\nsource = 'uhs'"), "4: source: source uhs has no type"),
            (device("path = '/a'\nsource = 'nfs:x'"), "4: source: there are no sources of type"),
            (device("path = '/a'"), "missing field `source`"),
            (
                device("path = '/a'\nsource = 'memory:'\nworker = true"),
                "5: worker: sources of type memory do no I/O",
            ),
            (device("path = '/'\nsource = 'memory:'"), "3: path: \"/\" is not the path"),
            (
                device("path = '/a/../b'\nsource = 'memory:'"),
                "3: path: \"/a/../b\" is not the path",
            ),
            (
                device("path = '/a'\nsource = 'memory:'\noptions = ['size=1M',\n 'sice=1']"),
                "6: 'sice: there is no option sice of memory",
            ),
            (two("/a/b"), "7: path: \"/a/b\" is in \"/a/b\""),
            (two("/a/b/c"), "7: path: \"/a/b/c\" is in \"/a/b\""),
            (two("/a"), "4: path: \"/a/b\" is in \"/a\""),
        ] {
            let failure = parse(&text).err().unwrap_or_else(|| panic!("{text}"));
            let shown = failure.to_string();
            assert!(shown.starts_with("/etc/m.toml:") && shown.contains(says), "{text}: {shown}");
            assert_eq!((failure.code(), shown.lines().count()), (2, 1), "{shown}");
        }
    }
}
