//! Checks of answers beside the model. An error describes the difference.

use std::time::Duration;

use super::history::ClientLook;
use super::world::{ClientWorld, NAMES, NameNumber, names};

/// The answer to an operation: words, or the number of an error.
pub type OperationAnswer = Result<Vec<String>, i32>;

impl ClientWorld {
    /// The answer to `stat`. True if it is the present state.
    pub fn check_stat(
        &self,
        at: NameNumber,
        look: ClientLook,
        answer: &OperationAnswer,
    ) -> Result<bool, String> {
        let words = match answer {
            Err(libc::ENOENT) => return self.check_missing(at, look),
            Err(errno) => return Err(format!("errno {errno}")),
            Ok(words) => words,
        };
        let number = |word: usize| words[word].parse::<u64>().unwrap();
        let node = self.find(at, look, number(0), &words[1])?;
        let known = &self.nodes[node];
        let mode = u32::from_str_radix(&words[2], 8).unwrap();
        let is_file = known.kind == 'f';
        if known.kind != 'l' && !known.mode.has(look, &mode) {
            return Err(stale_message(
                "mode",
                &format!("{mode:o}"),
                known.mode.age(&mode, look.begun),
            ));
        }
        for (what, history, word) in [("size", &known.size, 3), ("links", &known.links, 4)] {
            if is_file && !history.has(look, &number(word)) {
                let age = history.age(&number(word), look.begun);
                return Err(stale_message(what, &words[word], age));
            }
        }
        let is_latest = *self.names[at].latest_value() == Some(node)
            && (known.kind == 'l' || *known.mode.latest_value() == mode)
            && (!is_file
                || (*known.size.latest_value() == number(3)
                    && *known.links.latest_value() == number(4)));
        Ok(is_latest)
    }

    /// The answer to `read`: of a file that was closed before it was opened.
    pub fn check_read(
        &self,
        at: NameNumber,
        look: ClientLook,
        answer: &OperationAnswer,
    ) -> Result<(), String> {
        let kinds: Vec<char> = self.names[at]
            .visible_values(look)
            .flatten()
            .map(|&node| self.nodes[node].kind)
            .collect();
        let words = match answer {
            // A symbolic link leads nowhere.
            Err(libc::ENOENT) if kinds.contains(&'l') => return Ok(()),
            Err(libc::EISDIR) if kinds.contains(&'d') => return Ok(()),
            Err(libc::ENOENT) => return self.check_missing(at, look).map(drop),
            // The kernel looks up the name of an inode that is gone only once more.
            Err(libc::ESTALE) if self.is_replaced_twice(at, look) => return Ok(()),
            Err(errno) => return Err(format!("errno {errno}")),
            Ok(words) => words,
        };
        let node = self.find(at, look, words[0].parse().unwrap(), "f")?;
        self.check_data(node, look.without_delay(), words)
    }

    /// True if a look may have found a directory at a name that had a name in the other directory
    /// before.
    pub fn has_moved(&self, at: NameNumber, look: ClientLook) -> bool {
        let mut found = self.names[at].visible_values(look).flatten();
        found.any(|&node| {
            let elsewhere = names().filter(|other| other / NAMES != at / NAMES);
            let mut known =
                elsewhere.flat_map(|other| self.names[other].values_until(look).flatten());
            self.nodes[node].kind == 'd' && known.any(|&other| other == node)
        })
    }

    /// True if a name lost two files, one after the other, during a look.
    fn is_replaced_twice(&self, at: NameNumber, look: ClientLook) -> bool {
        let seen: Vec<_> = self.names[at].visible_values(look.without_delay()).collect();
        let (_, lost) = seen.split_last().expect("there is a value");
        lost.iter().filter(|node| node.is_some()).count() >= 2
    }

    /// The answer to `held`, for an open file of a node.
    pub fn check_held(
        &self,
        node: usize,
        look: ClientLook,
        answer: &OperationAnswer,
    ) -> Result<(), String> {
        match answer {
            Ok(words) => self.check_data(node, look, words),
            Err(errno) => Err(format!("errno {errno} of an open file")),
        }
    }

    /// The answer to `list` for a directory: its names, with inodes that some name has had. A
    /// server that answers a look while it carries a change out may list the name with the inode of
    /// the former file and the kind of the new one, also to GlusterFS's own client, until a client
    /// looks at the name again, and a renaming takes that along to the new name. GlusterFS's own
    /// client (`is_native`) also lists inodes of a brick's own file system, whose numbers are
    /// small.
    pub fn check_list(
        &self,
        dir: usize,
        look: ClientLook,
        (answer, is_native): (&OperationAnswer, bool),
    ) -> Result<(), String> {
        let words = answer.as_ref().map_err(|errno| format!("errno {errno}"))?;
        // Then a name may be in it twice: bricks order the names of a directory by the times of
        // renamings.
        let is_changing = (dir * NAMES..(dir + 1) * NAMES)
            .any(|at| self.names[at].visible_values(look.without_delay()).count() > 1);
        let mut listed = [false; NAMES];
        for word in words {
            let mut parts = word.split(':');
            let [name, ino, kind] = [(); 3].map(|()| parts.next().unwrap());
            let number = name.strip_prefix('n').and_then(|number| number.parse::<usize>().ok());
            let number = number.filter(|number| *number < NAMES);
            let number = number.ok_or_else(|| format!("{name} is in the listing {words:?}"))?;
            let at = dir * NAMES + number;
            if listed[number] && !is_changing {
                return Err(format!("{name} is twice in the listing {words:?}"));
            }
            listed[number] = true;
            if !self.names[at].visible_values(look).any(Option::is_some) {
                return Err(format!("{name} is missing, yet in the listing {words:?}"));
            }
            let is_of_brick = is_native && ino.parse().is_ok_and(|ino: u64| ino >> 32 == 0);
            if !is_of_brick && !self.nodes.iter().any(|node| node.ino.to_string() == ino) {
                return Err(format!("{name} has an unknown inode: the listing {words:?}"));
            }
            let mut known =
                self.names[at].values_until(look).flatten().map(|&node| &self.nodes[node]);
            if !known.any(|node| kind.chars().eq([node.kind])) {
                return Err(format!("{name} has never had this kind: the listing {words:?}"));
            }
        }
        for (number, _) in listed.into_iter().enumerate().filter(|(_, is_listed)| !is_listed) {
            let missing = self.check_missing(dir * NAMES + number, look);
            missing.map_err(|error| format!("n{number} in the listing {words:?}: {error}"))?;
        }
        Ok(())
    }

    fn check_missing(&self, at: NameNumber, look: ClientLook) -> Result<bool, String> {
        if self.names[at].has(look, &None) {
            return Ok(self.names[at].latest_value().is_none());
        }
        Err(stale_message("name", "missing", self.names[at].age(&None, look.begun)))
    }

    fn check_data(&self, node: usize, look: ClientLook, words: &[String]) -> Result<(), String> {
        let (node, sum) = (&self.nodes[node], u64::from_str_radix(&words[2], 16).unwrap());
        if node.ino.to_string() != words[0] {
            return Err(format!("inode {} instead of {}", words[0], node.ino));
        }
        // A reader of several pages may find some of them before a change and some after it.
        if node.data.has(look, &sum) || node.data.visible_values(look).count() > 1 {
            return Ok(());
        }
        let text = format!("{} bytes with the sum {sum:x}", words[1]);
        Err(stale_message("data", &text, node.data.age(&sum, look.begun)))
            .map_err(|error| format!("{error}; {} bytes now", node.size.latest_value()))
    }

    /// The node with a number that a name may lead to.
    fn find(
        &self,
        at: NameNumber,
        look: ClientLook,
        ino: u64,
        kind: &str,
    ) -> Result<usize, String> {
        let mut seen = self.names[at].visible_values(look).flatten();
        let found = seen.find(|&&node| self.nodes[node].ino == ino);
        let Some(&node) = found else {
            let known = self.nodes.iter().position(|node| node.ino == ino);
            let age = known.and_then(|node| self.names[at].age(&Some(node), look.begun));
            return Err(stale_message("name", &format!("inode {ino} ({known:?})"), age));
        };
        let right = self.nodes[node].kind;
        if kind.chars().eq([right]) { Ok(node) } else { Err(format!("kind {kind}, not {right}")) }
    }
}

fn stale_message(what: &str, seen: &str, age: Option<Duration>) -> String {
    match age {
        Some(age) => format!("{what}: {seen} was replaced {} ms before", age.as_millis()),
        None => format!("{what}: {seen} was never true"),
    }
}
