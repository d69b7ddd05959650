//! The names in a directory of any file system.

use defuse_fs::{Context, DirBuf, DirItem, DirSink, Entry, File, FileSystem};

/// Names, and the position after them.
#[derive(Default)]
struct ListedNames(Vec<String>, u64);

impl DirSink for ListedNames {
    fn wants_entries(&self) -> bool {
        false
    }

    fn fits(&self, _: usize) -> bool {
        true
    }

    fn add(&mut self, item: DirItem<'_>, _: Option<&Entry>) {
        self.0.push(String::from_utf8(item.name.to_vec()).unwrap());
        self.1 = item.next;
    }
}

/// The names in an open directory, in order, without `.` and `..`. The directory is closed.
///
/// # Panics
///
/// If it cannot be read, and for names that are no text.
pub fn list(fs: &dyn FileSystem, cx: &Context<'_>, dir: File) -> Vec<String> {
    let mut names = ListedNames::default();
    loop {
        let (count, from) = (names.0.len(), names.1);
        fs.readdir(cx, dir, from, &mut DirBuf::new(&mut names)).unwrap();
        if names.0.len() == count {
            break;
        }
    }
    fs.releasedir(cx, dir).unwrap();
    names.0.retain(|name| name != "." && name != "..");
    names.0.sort();
    names.0
}
