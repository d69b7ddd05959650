//! The volfile, the configuration of a volume, as the management servers send it. It shows whether
//! bricks report changes.
//!
//! libgfapi reads the same text, but makes it available only after it has connected.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::sync::Arc;
use std::time::Duration;

use crate::volume::VolumeConnection;

/// The longest text that is read.
const LONGEST: usize = 1 << 20;

/// The time after which a brick forgets that a client knows a file, unless the volume configures
/// another time.
const USUAL: Duration = Duration::from_secs(60);

/// The program "GlusterFS Handshake" of ONC RPC (RFC 5531) with its procedure GETSPEC.
const PROGRAM: u32 = 14_398_633;
const VERSION: u32 = 2;
const GETSPEC: u32 = 2;

/// A brick of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Brick {
    /// The name of the translator of libgfapi that communicates with the brick.
    pub client: String,
    host: String,
    path: String,
}

impl Brick {
    /// The name of the brick's own configuration.
    pub fn key(&self, volume: &str) -> String {
        let path = self.path.trim_start_matches('/').replace('/', "-");
        format!("{volume}.{}.{path}", self.host)
    }
}

/// Fetches the configuration `key`: the name of a volume, or the [key](Brick::key) of a brick.
///
/// # Errors
///
/// The errors of the stream, `InvalidData` for an invalid answer, and `NotFound` if there is no
/// such configuration.
pub fn fetch(stream: &mut (impl Read + Write), key: &str) -> Result<String> {
    stream.write_all(&request(key))?;
    answer(&receive(stream)?)
}

/// The bricks in the configuration of a volume.
pub fn bricks(text: &str) -> Vec<Brick> {
    let clients = parts(text).filter(|part| part.kind == "protocol/client");
    clients
        .filter_map(|part| {
            let option = |name| part.option(name).map(str::to_owned);
            let (host, path) = (option("remote-host")?, option("remote-subvolume")?);
            Some(Brick { client: part.name.to_owned(), host, path })
        })
        .collect()
}

/// The translators of a client, as far as this crate needs to know them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientGraph {
    /// Files consist of pieces.
    pub shards: bool,
    /// Bricks list a directory in different orders: a listing cannot go on at another brick.
    pub is_replicated: bool,
    /// Times of changes are those of the client, the same for a new file and its directory.
    pub has_client_times: bool,
}

impl ClientGraph {
    /// The translators that libgfapi uses now.
    pub fn from_volume(volume: &Arc<VolumeConnection>) -> ClientGraph {
        let text = volume.internal(c"/.meta/graphs/active/volfile").unwrap_or_default();
        ClientGraph::parse(&String::from_utf8_lossy(&text))
    }

    fn parse(text: &str) -> ClientGraph {
        let has = |kind: &str| parts(text).any(|part| part.kind == kind);
        ClientGraph {
            shards: has("features/shard"),
            is_replicated: has("cluster/replicate") || has("cluster/disperse"),
            has_client_times: has("features/utime"),
        }
    }
}

/// True if the client of a volume with this configuration may acknowledge writes before the servers
/// have them.
pub fn holds_writes(text: &str) -> bool {
    let is_held = parts(text).any(|part| part.kind == "performance/write-behind");
    is_held || bricks(text).is_empty()
}

/// The time for which the brick with this configuration reports changes to a client, after the
/// client has accessed a file. `None` if it does not report changes.
pub fn find_upcall_timeout(text: &str) -> Option<Duration> {
    let part = parts(text).find(|part| part.kind == "features/upcall")?;
    if !matches!(part.option("cache-invalidation"), Some("on" | "yes" | "true" | "enable" | "1")) {
        return None;
    }
    let seconds = part.option("cache-invalidation-timeout").map(str::parse);
    Some(seconds.and_then(std::result::Result::ok).map_or(USUAL, Duration::from_secs))
}

/// A section of a volfile.
struct VolfileSection<'a> {
    name: &'a str,
    kind: &'a str,
    options: Vec<(&'a str, &'a str)>,
}

impl<'a> VolfileSection<'a> {
    fn option(&self, name: &str) -> Option<&'a str> {
        self.options.iter().find(|option| option.0 == name).map(|option| option.1)
    }
}

fn parts(text: &str) -> impl Iterator<Item = VolfileSection<'_>> {
    text.split("end-volume").map(|block| {
        let mut part = VolfileSection { name: "", kind: "", options: Vec::new() };
        for line in block.lines() {
            match line.trim().split_once(' ') {
                Some(("volume", name)) => part.name = name,
                Some(("type", kind)) => part.kind = kind,
                Some(("option", rest)) => part.options.extend(rest.split_once(' ')),
                _ => {}
            }
        }
        part
    })
}

/// The call, in XDR, as one record. Servers send the configuration only to clients that state which
/// versions they support.
fn request(key: &str) -> Vec<u8> {
    let mut versions = Vec::new();
    let pairs = [("min-op-version", "1"), ("max-op-version", "100000")];
    put(&mut versions, pairs.len() as u32);
    for (name, value) in pairs {
        put(&mut versions, name.len() as u32);
        put(&mut versions, value.len() as u32 + 1);
        versions.extend_from_slice(name.as_bytes());
        versions.push(0);
        versions.extend_from_slice(value.as_bytes());
        versions.push(0);
    }
    let mut call = Vec::new();
    // Number of the call, CALL, version of RPC, procedure, no credential and no verifier, flags.
    for word in [1, 0, 2, PROGRAM, VERSION, GETSPEC, 0, 0, 0, 0, 0] {
        put(&mut call, word);
    }
    for bytes in [key.as_bytes(), &versions] {
        put(&mut call, bytes.len() as u32);
        call.extend_from_slice(bytes);
        call.resize(call.len().next_multiple_of(4), 0);
    }
    let mut record = Vec::with_capacity(call.len() + 4);
    put(&mut record, LAST | call.len() as u32);
    record.extend_from_slice(&call);
    record
}

/// The mark of the last fragment of a record.
const LAST: u32 = 1 << 31;

fn put(bytes: &mut Vec<u8>, word: u32) {
    bytes.extend_from_slice(&word.to_be_bytes());
}

fn receive(stream: &mut impl Read) -> Result<Vec<u8>> {
    let mut record = Vec::new();
    // A record has one fragment, or a few.
    for _ in 0..64 {
        let mut head = [0; 4];
        stream.read_exact(&mut head)?;
        let head = u32::from_be_bytes(head);
        let (old, len) = (record.len(), (head & !LAST) as usize);
        if old + len > LONGEST {
            break;
        }
        record.resize(old + len, 0);
        stream.read_exact(&mut record[old..])?;
        if head & LAST != 0 {
            return Ok(record);
        }
    }
    Err(invalid("an answer of more than a megabyte"))
}

/// The text in an answer.
fn answer(record: &[u8]) -> Result<String> {
    let word = |at: usize| {
        let bytes = record.get(at * 4..at * 4 + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map(u32::from_be_bytes).ok_or_else(|| invalid("an answer that is too short"))
    };
    // REPLY, accepted; a verifier without data, success.
    if [word(1)?, word(2)?, word(4)?, word(5)?] != [1, 0, 0, 0] {
        return Err(invalid("a server that refuses the question"));
    }
    if word(6)?.cast_signed() < 0 {
        return Err(Error::new(ErrorKind::NotFound, "a server that does not know the volume"));
    }
    let text = record.get(36..36 + word(8)? as usize);
    let text = text.ok_or_else(|| invalid("an answer that is too short"))?;
    Ok(String::from_utf8_lossy(text).trim_end_matches('\0').to_owned())
}

fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: &str = "volume v-client-0\n    type protocol/client\n    option remote-subvolume /b/1\n    \
                          option remote-host h.net\nend-volume\n\nvolume v\n    type debug/io-stats\n    \
                          subvolumes v-client-0\nend-volume\n";

    fn brick(options: &str) -> String {
        format!(
            "volume a\n type storage/posix\nend-volume\nvolume u\n type features/upcall\n{options}end-volume\n"
        )
    }

    #[test]
    fn bricks_have_the_names_of_their_configuration() {
        let all = bricks(CLIENT);
        assert_eq!(all.len(), 1);
        assert_eq!(
            (all[0].client.as_str(), all[0].key("v").as_str()),
            ("v-client-0", "v.h.net.b-1")
        );
        assert_eq!(bricks("type protocol/client\noption remote-host h"), []);
    }

    #[test]
    fn bricks_tell_of_changes_only_if_the_volume_says_so() {
        let on = " option cache-invalidation on\n";
        assert_eq!(find_upcall_timeout(&brick(on)), Some(USUAL));
        let long = format!(" option cache-invalidation-timeout 600\n{on}");
        assert_eq!(find_upcall_timeout(&brick(&long)), Some(Duration::from_secs(600)));
        assert_eq!(find_upcall_timeout(&brick(" option cache-invalidation off\n")), None);
        assert_eq!(find_upcall_timeout(&brick("")), None);
        assert_eq!(find_upcall_timeout(CLIENT), None);
    }

    #[test]
    fn shards_and_copies_are_translators_of_the_client() {
        let with = |kind| format!("{CLIENT}volume x\n type {kind}\nend-volume\n");
        let graph =
            |shards, is_replicated| ClientGraph { shards, is_replicated, has_client_times: false };
        assert_eq!(ClientGraph::parse(CLIENT), graph(false, false));
        assert_eq!(ClientGraph::parse(&with("features/shard")), graph(true, false));
        assert_eq!(ClientGraph::parse(&with("cluster/replicate")), graph(false, true));
        assert_eq!(ClientGraph::parse(&with("cluster/disperse")), graph(false, true));
    }

    #[test]
    fn writes_are_held_by_one_translator_and_by_an_unknown_client() {
        let behind = "volume b\n type performance/write-behind\nend-volume\n";
        assert!(holds_writes(&format!("{CLIENT}{behind}")) && holds_writes(behind));
        assert!(holds_writes("") && !holds_writes(CLIENT));
    }

    fn reply(result: i32, text: &[u8]) -> Vec<u8> {
        let mut record = Vec::new();
        for word in [1, 1, 0, 0, 0, 0, result as u32, 0, text.len() as u32] {
            put(&mut record, word);
        }
        record.extend_from_slice(text);
        record
    }

    #[test]
    fn an_answer_is_a_text_or_an_error() {
        assert_eq!(answer(&reply(4, b"text\0")).unwrap(), "text");
        assert_eq!(answer(&reply(-1, b"")).unwrap_err().kind(), ErrorKind::NotFound);
        for len in 0..reply(4, b"text").len() {
            assert!(answer(&reply(4, b"text")[..len]).is_err());
        }
        let mut wrong = reply(4, b"text");
        wrong[35] = 255;
        assert!(answer(&wrong).is_err());
        wrong[11] = 1;
        assert!(answer(&wrong).is_err());
    }

    #[test]
    fn fragments_are_joined_and_their_sum_is_bounded() {
        let mut stream = vec![0, 0, 0, 2, b'a', b'b', 0x80, 0, 0, 1, b'c'];
        assert_eq!(receive(&mut stream.as_slice()).unwrap(), b"abc");
        stream.truncate(8);
        assert!(receive(&mut stream.as_slice()).is_err());
        assert!(receive(&mut [0x8f, 0, 0, 0].as_slice()).is_err());
        assert!(receive(&mut vec![0; 400].as_slice()).is_err());
    }

    #[test]
    fn a_question_is_one_record_of_whole_words() {
        let record = request("vol");
        assert_eq!((record.len() % 4, record[0], record[3] as usize), (0, 0x80, record.len() - 4));
        assert_eq!(&record[48..56], [0, 0, 0, 3, b'v', b'o', b'l', 0]);
    }
}
