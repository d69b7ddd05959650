//! Completed requests, for a trace.

use std::collections::HashMap;

use defuse_probe::Op;

/// The names in a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestNames {
    /// The name in a directory, or of an extended attribute.
    pub name: Option<String>,
    /// The second name: the new name of RENAME, or the target of SYMLINK.
    pub name2: Option<String>,
}

/// A completed request. Times are nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompletedRequest {
    /// Number of the request within the connection.
    pub unique: u64,
    /// The connection.
    pub connection: u32,
    /// The operation.
    pub op: Op,
    /// The inode of the request; for a request with a name, the directory.
    pub nodeid: u64,
    /// The inode in the reply.
    pub child: Option<u64>,
    /// Offset of READ, WRITE and READDIR.
    pub offset: u64,
    /// Requested number of bytes.
    pub size: u32,
    /// Length of the request with its header, in bytes.
    pub request_len: u32,
    /// Length of the reply with its header, in bytes.
    pub reply_len: u32,
    /// Error of the reply, positive; 0 for none.
    pub error: i32,
    /// The request went through the background queue.
    pub background: bool,
    /// Time of creation, if observed.
    pub created_ns: Option<u64>,
    /// Time of sending.
    pub sent_ns: u64,
    /// Time when the daemon read it, if observed.
    pub taken_ns: Option<u64>,
    /// Time of completion.
    pub ended_ns: u64,
    /// The process that made the request, by its id in the initial pid namespace; 0 if not
    /// observed. (tracefs reports only the thread.)
    pub pid: u32,
    /// Name of the thread that made the request.
    pub comm: String,
    /// The thread of the daemon that read it.
    pub taker: Option<u32>,
    /// The names in the request.
    pub names: RequestNames,
}

impl CompletedRequest {
    /// Start of the request: its creation if it waited in the background queue, otherwise its
    /// sending.
    pub fn start_ns(&self) -> u64 {
        self.created_ns.filter(|_| self.background).unwrap_or(self.sent_ns)
    }

    /// Total time.
    pub fn total_ns(&self) -> u64 {
        self.ended_ns.saturating_sub(self.start_ns())
    }

    /// Time in the background queue; `None` if it was not there, or not observed.
    pub fn background_ns(&self) -> Option<u64> {
        let created = self.created_ns.filter(|_| self.background)?;
        Some(self.sent_ns.saturating_sub(created))
    }

    /// Time in the pending queue; `None` if the read by the daemon was not observed.
    pub fn pending_ns(&self) -> Option<u64> {
        Some(self.taken_ns?.saturating_sub(self.sent_ns))
    }

    /// Time from the read by the daemon to the end; `None` if the read was not observed.
    pub fn processing_ns(&self) -> Option<u64> {
        Some(self.ended_ns.saturating_sub(self.taken_ns?))
    }

    /// Time of pending and processing together, if the read by the daemon was not observed.
    pub fn unsplit_ns(&self) -> Option<u64> {
        let unseen = self.taken_ns.is_none();
        unseen.then(|| self.ended_ns.saturating_sub(self.sent_ns))
    }
}

/// Selects the requests that become events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventFilter {
    /// Only these operations; empty for all.
    pub ops: Vec<Op>,
    /// Only requests of this process.
    pub pid: Option<u32>,
    /// Only requests that took at least this long, in nanoseconds.
    pub slower_than_ns: u64,
    /// Only requests that failed.
    pub errors: bool,
}

impl EventFilter {
    /// True if the request is selected.
    pub fn wants(&self, event: &CompletedRequest) -> bool {
        (self.ops.is_empty() || self.ops.contains(&event.op))
            && self.pid.is_none_or(|pid| pid == event.pid)
            && event.total_ns() >= self.slower_than_ns
            && (!self.errors || event.error != 0)
    }
}

/// Maximum number of names to remember. Beyond it, the older half is forgotten.
const NAMES_MAX: usize = 65_536;

/// The names of inodes, from LOOKUP and similar requests.
#[derive(Debug, Default)]
pub struct NodeNames {
    names: HashMap<u64, NodeName>,
    learned: u64,
}

#[derive(Debug)]
struct NodeName {
    parent: u64,
    name: String,
    /// Number of names learned before this one.
    age: u64,
}

/// The inode number of the root (`FUSE_ROOT_ID`).
const ROOT: u64 = 1;

impl NodeNames {
    /// Records the names in a request.
    pub fn learn(&mut self, event: &CompletedRequest) {
        let Some(name) = &event.names.name else { return };
        if event.error != 0 {
            return;
        }
        if let (Op::RENAME | Op::RENAME2, Some(new)) = (event.op, &event.names.name2) {
            self.rename(event.nodeid, name, new);
        }
        let Some(child) = event.child.filter(|child| *child != 0) else { return };
        if self.names.len() >= NAMES_MAX {
            let limit = self.learned - NAMES_MAX as u64 / 2;
            self.names.retain(|_, known| known.age > limit);
        }
        self.learned += 1;
        let (parent, age) = (event.nodeid, self.learned);
        self.names.insert(child, NodeName { parent, name: name.clone(), age });
    }

    /// The target directory is not known here, so a second rename is not tracked.
    fn rename(&mut self, parent: u64, name: &str, new: &str) {
        let mut all = self.names.values_mut();
        if let Some(known) = all.find(|known| known.parent == parent && known.name == name) {
            *known = NodeName { parent: 0, name: new.to_owned(), age: known.age };
        }
    }

    /// The name of a request: its own, or the name of its inode.
    pub fn describe(&self, event: &CompletedRequest) -> Option<String> {
        match (&event.names.name, &event.names.name2) {
            (Some(name), Some(second)) => Some(format!("{name} -> {second}")),
            (Some(name), None) => Some(name.clone()),
            _ if event.nodeid == ROOT => Some("/".to_owned()),
            _ => self.names.get(&event.nodeid).map(|known| known.name.clone()),
        }
    }
}

#[cfg(test)]
pub(crate) fn example() -> CompletedRequest {
    CompletedRequest {
        unique: 4,
        connection: 43,
        op: Op::LOOKUP,
        nodeid: ROOT,
        child: Some(7),
        offset: 0,
        size: 0,
        request_len: 42,
        reply_len: 144,
        error: 0,
        background: false,
        created_ns: Some(900),
        sent_ns: 1_000,
        taken_ns: Some(4_000),
        ended_ns: 10_000,
        pid: 99,
        comm: "cat".into(),
        taker: Some(12),
        names: RequestNames { name: Some("a".into()), name2: None },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stages_of_a_request_are_its_total() {
        let mut event = example();
        let sum = |event: &CompletedRequest| {
            let stages = [
                event.background_ns(),
                event.pending_ns(),
                event.processing_ns(),
                event.unsplit_ns(),
            ];
            stages.iter().flatten().sum::<u64>()
        };
        assert_eq!((event.total_ns(), event.background_ns()), (9_000, None));
        assert_eq!(sum(&event), event.total_ns());
        event.background = true;
        assert_eq!((event.total_ns(), event.background_ns()), (9_100, Some(100)));
        assert_eq!(sum(&event), event.total_ns());
        event.taken_ns = None;
        assert_eq!((event.unsplit_ns(), event.pending_ns()), (Some(9_000), None));
        assert_eq!(sum(&event), event.total_ns());
    }

    #[test]
    fn an_inode_has_the_name_of_its_last_lookup() {
        let mut names = NodeNames::default();
        let found = example();
        names.learn(&found);
        let read = CompletedRequest {
            op: Op::READ,
            nodeid: 7,
            names: RequestNames::default(),
            ..found.clone()
        };
        assert_eq!(names.describe(&read).as_deref(), Some("a"));
        assert_eq!(names.describe(&CompletedRequest { nodeid: 8, ..read.clone() }), None);
        assert_eq!(
            names.describe(&CompletedRequest { nodeid: 1, ..read.clone() }).as_deref(),
            Some("/")
        );
        let renaming = RequestNames { name: Some("a".into()), name2: Some("b".into()) };
        let renamed =
            CompletedRequest { op: Op::RENAME, child: None, names: renaming, ..found.clone() };
        names.learn(&renamed);
        assert_eq!(names.describe(&renamed).as_deref(), Some("a -> b"));
        assert_eq!(names.describe(&read).as_deref(), Some("b"));
        for child in 0..2 * NAMES_MAX as u64 {
            names.learn(&CompletedRequest { child: Some(child + 10), ..found.clone() });
        }
        assert!(names.names.len() <= NAMES_MAX);
    }
}
