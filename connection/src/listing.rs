//! Directory entries on their way to a client.

use defuse_fs::{DirBuf, DirItem, DirSink, Entry, Ino, Name};

use crate::ledger::ConnectionLedger;

/// Passes entries on, and records their lookups.
pub(crate) struct AccountedListing<'a, 'b> {
    pub(crate) out: &'a mut DirBuf<'b>,
    pub(crate) ledger: &'a ConnectionLedger,
    pub(crate) dir: Ino,
    /// True if entries come with lookups.
    pub(crate) gives: bool,
}

impl DirSink for AccountedListing<'_, '_> {
    fn wants_entries(&self) -> bool {
        self.gives
    }

    fn fits(&self, name_len: usize) -> bool {
        self.out.fits(name_len)
    }

    fn add(&mut self, item: DirItem<'_>, entry: Option<&Entry>) {
        if let Some(entry) = entry {
            self.ledger.count_lookup(entry.ino);
            if let Ok(name) = Name::new(item.name) {
                self.ledger.record_lookup(self.dir, name, entry.ino);
            }
        }
        self.out.push_with(item, || entry.copied());
    }
}
