//! The rest of a path during a walk: the caller's path, preceded by the texts of symbolic links.

use std::borrow::Cow;

use defuse_fs::Result;

/// The maximum length of a path, `PATH_MAX` without its NUL.
pub(crate) const PATH_MAX: usize = 4095;

/// The kind of a path component.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ComponentKind {
    /// A file name.
    Name,
    /// `.`
    Dot,
    /// `..`
    DotDot,
}

/// A path component.
pub(crate) struct PathComponent<'a> {
    pub part: ComponentKind,
    /// Only slashes follow.
    pub last: bool,
    /// At least one slash follows.
    pub slash: bool,
    text: Cow<'a, [u8]>,
}

impl<'a> PathComponent<'a> {
    /// A component of the caller's path, or a copy of one from the text of a link, which may change
    /// meanwhile.
    fn new(text: Cow<'a, [u8]>) -> Self {
        let part = match &*text {
            b"." => ComponentKind::Dot,
            b".." => ComponentKind::DotDot,
            _ => ComponentKind::Name,
        };
        PathComponent { part, last: false, slash: false, text }
    }

    /// The bytes of the component.
    pub fn bytes(&self) -> &[u8] {
        &self.text
    }

    /// The component as a file name. Fails with `ENAMETOOLONG`.
    pub fn name(&self) -> Result<defuse_fs::Name<'_>> {
        defuse_fs::Name::new(self.bytes())
    }
}

/// The rest of a path.
pub(crate) struct RemainingPath<'a> {
    path: &'a [u8],
    at: usize,
    /// Texts of links, the innermost last, each with the offset reached.
    links: Vec<(Vec<u8>, usize)>,
}

impl<'a> RemainingPath<'a> {
    pub fn new(path: &'a [u8], at: usize) -> Self {
        RemainingPath { path, at, links: Vec::new() }
    }

    /// Continues with the text of a link.
    pub fn push(&mut self, text: Vec<u8>) {
        self.links.push((text, 0));
    }

    /// The caller's path from the next component to the one before the last, if these are several,
    /// and the last one has no slash after it.
    pub fn parent_path(&self) -> Option<&'a [u8]> {
        if !self.links.is_empty() {
            return None;
        }
        let (start, _) = next_in(self.path, self.at)?;
        let rest = &self.path[start..];
        let end = rest.iter().rposition(|&byte| byte == b'/').filter(|end| end + 1 < rest.len())?;
        let before = &rest[..end];
        before.contains(&b'/').then_some(before)
    }

    /// Continues after `before`, which [`parent_path`](RemainingPath::parent_path) has returned.
    pub fn skip(&mut self, before: &'a [u8]) {
        if let Some((start, _)) = next_in(self.path, self.at) {
            self.at = start + before.len();
        }
    }

    /// Takes the next component. Returns `None` at the end.
    pub fn next(&mut self) -> Option<PathComponent<'a>> {
        while let Some((text, at)) = self.links.last_mut() {
            if let Some((start, end)) = next_in(text, *at) {
                *at = end;
                let mut component = PathComponent::new(Cow::Owned(text[start..end].to_vec()));
                component.slash = text.get(end) == Some(&b'/');
                component.last = self.is_at_end();
                component.slash |= component.last && self.slashes_left();
                return Some(component);
            }
            // A slash at the end of a link's text requires a directory.
            self.links.pop();
        }
        let (start, end) = next_in(self.path, self.at)?;
        self.at = end;
        let mut component = PathComponent::new(Cow::Borrowed(&self.path[start..end]));
        component.slash = self.path.get(end) == Some(&b'/');
        component.last = self.is_at_end();
        Some(component)
    }

    fn is_at_end(&self) -> bool {
        next_in(self.path, self.at).is_none()
            && self.links.iter().all(|(text, at)| next_in(text, *at).is_none())
    }

    /// True if only slashes are left, and at least one.
    fn slashes_left(&self) -> bool {
        self.at < self.path.len() || self.links.iter().any(|(text, at)| *at < text.len())
    }

    /// The rest as text, without a leading slash.
    pub fn text(&self) -> Vec<u8> {
        let mut out: Vec<u8> = Vec::new();
        let links = self.links.iter().rev().map(|(text, at)| &text[*at..]);
        for part in links.chain([&self.path[self.at..]]) {
            if !out.is_empty() && !out.ends_with(b"/") && !part.starts_with(b"/") {
                if part.is_empty() {
                    continue;
                }
                out.push(b'/');
            }
            out.extend_from_slice(part);
        }
        let start = out.iter().position(|&byte| byte != b'/').unwrap_or(out.len());
        // Slashes alone still require a directory.
        if start == out.len() && start > 0 { b"/".to_vec() } else { out.split_off(start) }
    }
}

/// Start and end of the next component of `text`, from `at` on.
fn next_in(text: &[u8], at: usize) -> Option<(usize, usize)> {
    let rest = text.get(at..)?;
    let start = at + rest.iter().position(|&byte| byte != b'/')?;
    let len = text[start..].iter().position(|&byte| byte == b'/');
    Some((start, len.map_or(text.len(), |len| start + len)))
}

#[cfg(test)]
mod tests {
    use defuse_fs::Errno;

    use super::*;

    fn collect_all(rest: &mut RemainingPath<'_>) -> Vec<(String, bool, bool)> {
        let text = |c: &PathComponent<'_>| String::from_utf8_lossy(c.bytes()).into_owned();
        std::iter::from_fn(|| rest.next()).map(|c| (text(&c), c.last, c.slash)).collect()
    }

    #[test]
    fn several_names_before_the_last_one_can_be_skipped() {
        for (path, before) in [("a/b/c", "a/b"), ("/a//b/c", "a//b"), ("a/./b/c", "a/./b")] {
            let mut rest = RemainingPath::new(path.as_bytes(), 0);
            let found = rest.parent_path().unwrap();
            assert_eq!(found, before.as_bytes(), "{path}");
            rest.skip(found);
            assert_eq!(collect_all(&mut rest), [("c".to_owned(), true, false)], "{path}");
        }
        for path in ["", "/", "a", "a/b", "/a/b", "a/b/", "a/b/c/"] {
            assert_eq!(RemainingPath::new(path.as_bytes(), 0).parent_path(), None, "{path}");
        }
        let mut rest = RemainingPath::new(b"a/b/c/d", 0);
        rest.next();
        assert_eq!(rest.parent_path(), Some(&b"b/c"[..]));
        rest.push(b"x/y".to_vec());
        assert_eq!(rest.parent_path(), None);
    }

    #[test]
    fn the_text_of_a_link_precedes_the_rest_of_the_path() {
        let mut rest = RemainingPath::new(b"//a/./l/b//", 0);
        let names = [rest.next(), rest.next(), rest.next()].map(|c| c.unwrap().bytes().to_vec());
        assert_eq!(names, [b"a".to_vec(), b".".to_vec(), b"l".to_vec()]);
        rest.push(b"x//y".to_vec());
        assert_eq!(rest.text(), b"x//y/b//");
        let expected = [("x", false, true), ("y", false, false), ("b", true, true)]
            .map(|(n, l, s)| (n.into(), l, s));
        assert_eq!(collect_all(&mut rest), expected);
    }

    #[test]
    fn a_slash_after_a_link_or_at_its_end_asks_for_a_directory() {
        let mut rest = RemainingPath::new(b"l/", 0);
        rest.next();
        rest.push(b"t".to_vec());
        assert_eq!(collect_all(&mut rest), [("t".into(), true, true)]);
        let mut rest = RemainingPath::new(b"l", 0);
        rest.next();
        rest.push(b"t/".to_vec());
        assert_eq!(collect_all(&mut rest), [("t".into(), true, true)]);
    }

    #[test]
    fn a_component_of_256_bytes_is_too_long() {
        let path = [b'a'; 256];
        assert_eq!(RemainingPath::new(&path, 0).next().unwrap().name(), Err(Errno::ENAMETOOLONG));
        assert!(RemainingPath::new(&path[..255], 0).next().unwrap().name().is_ok());
    }
}
