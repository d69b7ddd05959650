//! The text of a source: `//HOST[,HOST...]/VOLUME[/DIRECTORY]`, or the path of a volume file.

use std::ffi::CString;
use std::path::Path;

use crate::GlusterOptions;

/// The parts of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeAddress {
    /// The management servers that know the volume, in the order in which the client queries them.
    /// Empty: the server of this machine, by its Unix socket.
    pub hosts: Vec<String>,
    /// The name of the volume.
    pub volume: String,
    /// The components of the directory that is served as the root.
    pub directory: Vec<CString>,
    /// The volfile, which describes the translators of the client; without it, the client fetches
    /// it from the servers.
    pub volfile: Option<CString>,
}

impl VolumeAddress {
    /// Parses the text after `gluster:`. Returns the reason and the right form as an error.
    pub fn parse(rest: &str) -> Result<VolumeAddress, String> {
        if rest.starts_with('/') && !rest.starts_with("//") {
            return VolumeAddress::from_volfile(rest);
        }
        let wrong = |why: &str| {
            format!("source gluster:{rest}: {why}: write gluster://HOST[,HOST...]/VOLUME[/DIR]")
        };
        let text = rest.strip_prefix("//").ok_or_else(|| wrong("it does not begin with //"))?;
        let (hosts, path) = text.split_once('/').ok_or_else(|| wrong("it names no volume"))?;
        let hosts: Vec<String> = match hosts {
            "" => Vec::new(),
            hosts => hosts.split(',').map(str::to_owned).collect(),
        };
        if hosts.iter().any(|host| !is_host(host)) {
            return Err(wrong(
                "a server is empty or has other characters than a name or an address",
            ));
        }
        let mut parts = path.split('/').filter(|part| !part.is_empty());
        let volume = parts.next().ok_or_else(|| wrong("it names no volume"))?;
        // `gluster volume create` accepts these characters.
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        if !volume.bytes().all(fits) {
            return Err(wrong("the volume has other characters than letters, digits, - and _"));
        }
        let directory = names(parts).map_err(wrong)?;
        Ok(VolumeAddress { hosts, volume: volume.to_owned(), directory, volfile: None })
    }

    /// Parses the text after `gluster:` with the option `sub-directory`, which excludes a directory
    /// in the text.
    pub fn with_options(rest: &str, options: &GlusterOptions) -> Result<VolumeAddress, String> {
        let mut address = VolumeAddress::parse(rest)?;
        let Some(path) = &options.sub_directory else { return Ok(address) };
        if !address.directory.is_empty() {
            return Err(format!(
                "source gluster:{rest}: its directory and sub-directory={path} exclude each other: leave one of \
                 them out"
            ));
        }
        let parts = path.split('/').filter(|part| !part.is_empty());
        address.directory = names(parts).map_err(|why| format!("sub-directory={path}: {why}"))?;
        Ok(address)
    }

    /// The volume that a volfile describes. It gets the name of the file.
    fn from_volfile(path: &str) -> Result<VolumeAddress, String> {
        let wrong = |why: &str| format!("source gluster:{path}: {why}: name a volume file");
        let name = Path::new(path).file_stem().ok_or_else(|| wrong("it names no file"))?;
        Ok(VolumeAddress {
            hosts: Vec::new(),
            volume: name.to_string_lossy().into_owned(),
            directory: Vec::new(),
            volfile: Some(CString::new(path).map_err(|_| wrong("it has a NUL"))?),
        })
    }
}

/// The names of the path to a directory, or the reason why they are invalid.
fn names<'a>(parts: impl Iterator<Item = &'a str>) -> Result<Vec<CString>, &'static str> {
    let name = |part: &str| match part {
        "." | ".." => Err("the directory has . or .."),
        part if part.len() > defuse_fs::NAME_MAX => Err("a name is too long"),
        part => CString::new(part).map_err(|_| "the directory has a NUL"),
    };
    parts.map(name).collect()
}

/// True for a host name and for an address of IPv4 or IPv6.
fn is_host(host: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:[]%".contains(&byte);
    !host.is_empty() && host.bytes().all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_volume_and_directory_are_read() {
        let address = VolumeAddress::parse("//a.example,10.0.0.2/vol/x//y z/").unwrap();
        assert_eq!(address.hosts, ["a.example", "10.0.0.2"]);
        assert_eq!(address.volume, "vol");
        assert_eq!(address.directory, [c"x".to_owned(), c"y z".to_owned()]);
        assert!(VolumeAddress::parse("///vol").unwrap().hosts.is_empty());
        let address = VolumeAddress::parse("/etc/own volume.vol").unwrap();
        assert_eq!(address.volume, "own volume");
        assert_eq!(address.volfile, Some(c"/etc/own volume.vol".to_owned()));
    }

    #[test]
    fn a_directory_is_named_once() {
        let with = |rest: &str, path: &str| {
            let sub_directory = Some(path.to_owned());
            VolumeAddress::with_options(
                rest,
                &GlusterOptions { sub_directory, ..GlusterOptions::default() },
            )
        };
        let expected = VolumeAddress::parse("//h/v/x/y z");
        assert_eq!(with("//h/v", "/x//y z/"), expected);
        assert_eq!(with("//h/v/", "x/y z"), expected);
        let twice = with("//h/v/x", "y").unwrap_err();
        assert!(twice.contains("sub-directory=y exclude each other"), "{twice}");
        for path in ["..", "x/../..", "./x", &"x".repeat(256)] {
            let error = with("//h/v", path).unwrap_err();
            assert!(error.starts_with(&format!("sub-directory={path}: ")), "{error}");
        }
        assert_eq!(with("/own.vol", "x").unwrap().directory, [c"x".to_owned()]);
    }

    #[test]
    fn a_wrong_source_is_refused_with_the_right_form() {
        for text in
            ["", "host/vol", "//host", "//host/", "//a,,b/v", "//a b/v", "//h/v;x", "//h/v/../x"]
        {
            let error = VolumeAddress::parse(text).unwrap_err();
            assert!(
                error.contains("write gluster://HOST[,HOST...]/VOLUME[/DIR]"),
                "{text}: {error}"
            );
        }
    }
}
