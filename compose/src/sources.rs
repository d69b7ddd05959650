//! The kinds of file systems, and sources: what is served.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use defuse_fs::FileSystem;
use defuse_fs::layer::ReadOnly;
use defuse_memory::Memory;
use defuse_passthrough::Passthrough;
use defuse_remote::{Program, Remote, RemoteOptions};

use crate::options::{Settings, split};
use crate::{Error, Result};

/// A kind of file system that can be mounted.
pub struct Backend {
    /// The word before the colon of a source.
    pub name: &'static str,
    /// How a source of this kind is written.
    pub form: &'static str,
    /// What it is, in one line.
    pub help: &'static str,
    /// Whether another program answers.
    pub is_remote: bool,
    /// Whether what follows the colon is a path, which is made absolute.
    pub is_path: bool,
    /// Makes the file system from what follows the colon.
    open: fn(&OsStr, &Settings) -> Result<Arc<dyn FileSystem>>,
}

/// All of them. A further one is one entry here, and its options in
/// [`OPTIONS`](crate::OPTIONS).
pub const BACKENDS: &[Backend] = &[
    Backend {
        name: "passthrough",
        form: "passthrough:DIR",
        help: "a directory of another file system",
        is_remote: false,
        is_path: true,
        open: open_passthrough,
    },
    Backend {
        name: "memory",
        form: "memory:",
        help: "files in memory, like tmpfs; gone with the mount",
        is_remote: false,
        is_path: false,
        open: open_memory,
    },
    Backend {
        name: "socket",
        form: "socket:PATH",
        help: "what another process serves there (defuse serve)",
        is_remote: true,
        is_path: true,
        open: open_socket,
    },
    Backend {
        name: "fuse",
        form: "fuse:COMMAND",
        help: "a FUSE program, such as fuse:sshfs host:/dir, without a mount of its own",
        is_remote: true,
        is_path: false,
        open: open_program,
    },
];

/// Lets changes through while it is set; of a file system that was made read-only.
pub type Switch = Option<Arc<AtomicBool>>;

/// What is to be mounted.
#[derive(Clone)]
pub struct Source {
    /// Its kind.
    pub backend: &'static Backend,
    /// What follows the colon.
    pub rest: OsString,
}

impl Source {
    /// Understands `KIND:REST`.
    pub fn parse(text: &OsStr) -> Result<Source> {
        let bytes = text.as_bytes();
        let Some(colon) = bytes.iter().position(|&byte| byte == b':') else {
            return Err(without_kind(text));
        };
        let name = String::from_utf8_lossy(&bytes[..colon]);
        let Some(backend) = BACKENDS.iter().find(|backend| backend.name == name) else {
            return Err(unknown_kind(&name));
        };
        let rest = OsStr::from_bytes(&bytes[colon + 1..]);
        if backend.is_path && rest.is_empty() {
            let text = text.display();
            return Err(Error::Usage(format!("source {text} names no path: {}", backend.form)));
        }
        let rest = if backend.is_path { absolute(rest) } else { rest.to_os_string() };
        Ok(Source { backend, rest })
    }

    /// Makes the file system. A read-only one refuses changes by itself as well, because the
    /// kernel's flag can be taken back while it is mounted.
    pub fn open(&self, settings: &Settings) -> Result<Arc<dyn FileSystem>> {
        self.open_with_switch(settings).map(|(fs, _)| fs)
    }

    /// The same, with the switch that lets changes through where it is read-only
    /// ([`ReadOnly::switch`]).
    pub fn open_with_switch(&self, settings: &Settings) -> Result<(Arc<dyn FileSystem>, Switch)> {
        let fs = (self.backend.open)(&self.rest, settings)?;
        if !settings.read_only {
            return Ok((fs, None));
        }
        let fs = ReadOnly::new(fs);
        let switch = fs.switch();
        Ok((Arc::new(fs), Some(switch)))
    }

    /// How it would be written, with its path made absolute.
    pub fn text(&self) -> OsString {
        let mut bytes = self.backend.name.as_bytes().to_vec();
        bytes.push(b':');
        bytes.extend_from_slice(self.rest.as_bytes());
        OsString::from_vec(bytes)
    }
}

/// The daemon works in `/`, so that a relative path would not mean the same there.
fn absolute(path: &OsStr) -> OsString {
    std::path::absolute(path).map_or_else(|_| path.to_os_string(), Into::into)
}

/// Makes the file system that a text names, for those without a command line: a source, and options
/// after commas (a backslash makes a comma part of what it stands in). `settings` are those to begin
/// with. Returns the source and what became of the settings, too.
pub fn open_text(
    text: &OsStr,
    mut settings: Settings,
) -> Result<(Source, Settings, Arc<dyn FileSystem>)> {
    let text = text.to_str().ok_or_else(|| {
        let shown = text.display();
        Error::Usage(format!("source {shown} is no UTF-8, which options after it have to be"))
    })?;
    let mut parts = split(text).into_iter();
    let source = Source::parse(OsStr::new(&parts.next().unwrap_or_default()))?;
    for option in parts {
        settings.apply(&source, &option)?;
    }
    let fs = source.open(&settings)?;
    Ok((source, settings, fs))
}

/// The kinds of sources, one a line.
pub fn help() -> String {
    let line = |backend: &Backend| format!("  {:<20} {}\n", backend.form, backend.help);
    BACKENDS.iter().map(line).collect()
}

fn without_kind(text: &OsStr) -> Error {
    let known = names();
    let shown = text.display();
    if Path::new(text).exists() || text.as_bytes().contains(&b'/') {
        return Error::Usage(format!(
            "source {shown} has no type: to serve this directory, write passthrough:{shown}"
        ));
    }
    Error::Usage(format!("source {shown} has no type: write TYPE:…, where TYPE is {known}"))
}

fn unknown_kind(name: &str) -> Error {
    let known = names();
    Error::Usage(format!("there are no sources of type {name:?}: known are {known}"))
}

fn names() -> String {
    BACKENDS.iter().map(|backend| backend.form).collect::<Vec<_>>().join(", ")
}

fn open_passthrough(rest: &OsStr, settings: &Settings) -> Result<Arc<dyn FileSystem>> {
    let fs = Passthrough::new(Path::new(rest), settings.passthrough.clone());
    Ok(Arc::new(fs.map_err(Error::failed)?))
}

fn open_memory(rest: &OsStr, settings: &Settings) -> Result<Arc<dyn FileSystem>> {
    if !rest.is_empty() {
        let rest = rest.display();
        return Err(Error::Usage(format!(
            "memory: takes nothing after its colon, but has {rest}: limits are options (-o size=1G)"
        )));
    }
    Ok(Arc::new(Memory::new(settings.memory)))
}

fn open_socket(rest: &OsStr, _: &Settings) -> Result<Arc<dyn FileSystem>> {
    let client = Remote::connect(Path::new(rest), RemoteOptions::default());
    Ok(Arc::new(client.map_err(Error::failed)?))
}

fn open_program(rest: &OsStr, _: &Settings) -> Result<Arc<dyn FileSystem>> {
    let text = rest.to_str().and_then(shlex::split).ok_or_else(|| {
        Error::Usage(format!("fuse:{} has an open quote or is no text", rest.display()))
    })?;
    let words: Vec<OsString> = text.into_iter().map(OsString::from).collect();
    let program = Program::start(&words).map_err(Error::failed)?;
    let client = Remote::of_program(program, RemoteOptions::default());
    Ok(Arc::new(client.map_err(Error::failed)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        Source::parse(OsStr::new(text)).err().unwrap().to_string()
    }

    #[test]
    fn sources_have_a_kind() {
        let source = Source::parse(OsStr::new("passthrough:/srv/a:b")).unwrap();
        assert_eq!(
            (source.backend.name, source.text()),
            ("passthrough", "passthrough:/srv/a:b".into())
        );
        let relative = Source::parse(OsStr::new("passthrough:x")).unwrap();
        assert!(Path::new(&relative.rest).is_absolute());
        assert!(Source::parse(OsStr::new("memory:")).is_ok());
    }

    #[test]
    fn a_text_is_a_source_with_options() {
        let open = |text: &str| {
            let opened = open_text(OsStr::new(text), Settings::default());
            opened.map(|(_, settings, fs)| (settings, fs.caps().read_only))
        };
        let (settings, read_only) = open("memory:,size=1M,ro").unwrap();
        assert_eq!((settings.memory.size, read_only), (Some(1 << 20), true));
        let message = |text| open(text).err().unwrap().to_string();
        assert!(message("memory:,sice=1").contains("known are ro, rw, size"));
        assert!(message("memory:,handles=on").contains("no option handles of memory"));
        assert!(message("memory:,size").contains("write size=BYTES"));
    }

    #[test]
    fn mistakes_name_the_next_step() {
        assert!(error("/tmp").ends_with("write passthrough:/tmp"));
        assert!(error("memory").contains("known") || error("memory").contains("memory:"));
        assert!(error("nfs:server").contains("passthrough:DIR, memory:"));
        assert!(error("passthrough:").contains("names no path"));
    }
}
