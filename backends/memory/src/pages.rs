//! Pages: their allocation ([`PagePool`]), and the pages of one file ([`PageMap`]).

use std::array;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use defuse_fs::{Errno, Result};
pub(crate) use defuse_hugepages::PAGE;
use defuse_hugepages::SmallPage;

use crate::sync::{SpaceQuota, lock};

const POOL_SHARDS: usize = 8;

/// All pages. Pages in use count against the limit. Some unused pages are kept, because writing to
/// them costs a tenth of a page that the kernel must fault in.
pub(crate) struct PagePool {
    pub quota: SpaceQuota,
    free: [Mutex<Vec<SmallPage>>; POOL_SHARDS],
    keep: usize,
}

impl PagePool {
    /// Creates a pool of at most `limit` pages in use, which keeps at most `keep` unused ones.
    pub fn new(limit: Option<u64>, keep: usize) -> Self {
        let free = array::from_fn(|_| Mutex::default());
        PagePool { quota: SpaceQuota::new(limit), free, keep: keep / POOL_SHARDS }
    }

    /// Reserves `count` pages. Fails with `ENOSPC`. Each is then obtained by [`PagePool::page`].
    pub fn reserve(&self, count: u64) -> Result<()> {
        if self.quota.take(count) { Ok(()) } else { Err(Errno::ENOSPC) }
    }

    /// Returns a reserved page. It has old content unless `zeroed` is set. Fails with `ENOMEM`, and
    /// gives the reservation back.
    pub fn page(&self, zeroed: bool) -> Result<SmallPage> {
        let kept = lock(&self.free[shard()]).pop();
        match kept {
            Some(mut page) => {
                if zeroed {
                    page.fill(0);
                }
                Ok(page)
            }
            None => SmallPage::zeroed().ok_or_else(|| {
                self.quota.give_back(1);
                Errno::ENOMEM
            }),
        }
    }

    /// Takes a page back, and its share of the limit.
    pub fn give_back(&self, page: SmallPage) {
        self.quota.give_back(1);
        let mut free = lock(&self.free[shard()]);
        if free.len() < self.keep {
            free.push(page);
        }
    }

    /// Drops the pages that are kept unused.
    pub fn release_free(&self) {
        for free in &self.free {
            let pages = std::mem::take(&mut *lock(free));
            // Dropped without the lock.
            drop(pages);
        }
    }

    /// Pages that are kept unused.
    pub fn free_pages(&self) -> usize {
        self.free.iter().map(|free| lock(free).len()).sum()
    }
}

/// The free list of this thread. Threads rarely share one, and a returned page is still in the
/// processor's cache.
fn shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static MINE: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    MINE.with(|mine| {
        if mine.get() == usize::MAX {
            mine.set(NEXT.fetch_add(1, Ordering::Relaxed) % POOL_SHARDS);
        }
        mine.get()
    })
}

/// Pages per chunk of the map. 512 bytes of pointers cover 256 KiB, so that a sparse file wastes
/// little, and one step in the tree serves 64 pages.
const CHUNK: u64 = 64;

struct PageChunk {
    pages: [Option<SmallPage>; CHUNK as usize],
    present: u32,
}

/// The pages of one file by index. An absent page is a hole.
#[derive(Default)]
pub(crate) struct PageMap {
    /// Page 0, which is in no chunk: most files have no other.
    first: Option<SmallPage>,
    chunks: BTreeMap<u64, Box<PageChunk>>,
    len: u64,
}

impl PageMap {
    /// Number of pages.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn get(&self, index: u64) -> Option<&[u8; PAGE]> {
        if index == 0 {
            return self.first.as_deref();
        }
        self.chunks.get(&(index / CHUNK))?.pages[(index % CHUNK) as usize].as_deref()
    }

    pub fn get_mut(&mut self, index: u64) -> Option<&mut [u8; PAGE]> {
        if index == 0 {
            return self.first.as_deref_mut();
        }
        self.chunks.get_mut(&(index / CHUNK))?.pages[(index % CHUNK) as usize].as_deref_mut()
    }

    /// Inserts a page at a hole.
    pub fn insert(&mut self, index: u64, page: SmallPage) {
        let old = if index == 0 {
            self.first.replace(page)
        } else {
            let empty =
                || Box::new(PageChunk { pages: [const { None }; CHUNK as usize], present: 0 });
            let chunk = self.chunks.entry(index / CHUNK).or_insert_with(empty);
            chunk.present += 1;
            chunk.pages[(index % CHUNK) as usize].replace(page)
        };
        assert!(old.is_none(), "a page may only fill a hole");
        self.len += 1;
    }

    /// Removes all pages with `first <= index < end`, and passes each to `gone`.
    pub fn remove(&mut self, first: u64, end: u64, mut gone: impl FnMut(u64, SmallPage)) {
        if first == 0
            && end > 0
            && let Some(page) = self.first.take()
        {
            self.len -= 1;
            gone(0, page);
        }
        let mut at = first;
        while let Some((&number, chunk)) = self.chunks.range_mut(at / CHUNK..).next() {
            let base = number * CHUNK;
            at = at.max(base);
            let stop = end.min(base + CHUNK);
            if at >= end {
                break;
            }
            for index in at..stop {
                if let Some(page) = chunk.pages[(index % CHUNK) as usize].take() {
                    chunk.present -= 1;
                    self.len -= 1;
                    gone(index, page);
                }
            }
            if chunk.present == 0 {
                self.chunks.remove(&number);
            }
            at = stop;
        }
    }

    /// The first index at or after `from` that has a page.
    pub fn next_present(&self, from: u64) -> Option<u64> {
        if from == 0 && self.first.is_some() {
            return Some(0);
        }
        for (&number, chunk) in self.chunks.range(from / CHUNK..) {
            let base = number * CHUNK;
            let first = from.max(base) - base;
            let here = chunk.pages[first as usize..].iter().position(Option::is_some);
            if let Some(offset) = here {
                return Some(base + first + offset as u64);
            }
        }
        None
    }

    /// The first index at or after `from` that has no page.
    pub fn next_absent(&self, from: u64) -> u64 {
        let mut at = from;
        if at == 0 {
            if self.first.is_none() {
                return 0;
            }
            at = 1;
        }
        while let Some(chunk) = self.chunks.get(&(at / CHUNK)) {
            let rest = &chunk.pages[(at % CHUNK) as usize..];
            match rest.iter().position(Option::is_none) {
                Some(offset) => return at + offset as u64,
                None => at += rest.len() as u64,
            }
        }
        at
    }

    /// Number of indexes with `first <= index < end` that have no page.
    pub fn holes(&self, first: u64, end: u64) -> u64 {
        let mut present = u64::from(first == 0 && end > 0 && self.first.is_some());
        for (&number, chunk) in self.chunks.range(first / CHUNK..end.div_ceil(CHUNK)) {
            let base = number * CHUNK;
            let (from, to) = (first.max(base) - base, end.min(base + CHUNK) - base);
            let slots = &chunk.pages[from as usize..to as usize];
            present += slots.iter().filter(|slot| slot.is_some()).count() as u64;
        }
        end - first - present
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_pages_are_released_where_memory_is_short() {
        use defuse_fs::*;
        let fs = crate::MemoryFileSystem::new(crate::MemoryOptions::default());
        let cx = Context::new(Caller::default());
        let (name, args) = (Name::new(b"f").unwrap(), OpenArgs::default());
        let node = NewNode::new(FileKind::Regular, 0o600, cx.caller);
        let made = FileSystem::create(&fs, &cx, Ino::ROOT, name, &node, args);
        let (entry, opened) = made.unwrap();
        let file = File { ino: entry.ino, fh: opened.fh };
        let bytes = vec![7; 16 * PAGE];
        let mut source = SliceSource::new(&bytes);
        FileSystem::write(&fs, &cx, file, WriteArgs::default(), &mut WriteBuf::new(&mut source))
            .unwrap();
        let set = SetAttr { size: Some(PAGE as u64), ..SetAttr::default() };
        FileSystem::setattr(&fs, &cx, file.ino, None, &set).unwrap();
        assert_eq!(fs.pool.free_pages(), 15);
        let figures: std::collections::BTreeMap<_, _> =
            fs.figures().into_iter().map(|figure| (figure.name, figure.value)).collect();
        assert_eq!((figures["inodes"], figures["space_used"]), (2, PAGE as u64));
        assert_eq!(figures["memory_kept"], 15 * PAGE as u64);
        assert!(figures["space_limit"] > PAGE as u64 && figures["inodes_limit"] > 2);
        fs.lifecycle().unwrap().memory_pressure();
        assert_eq!(
            (fs.pool.free_pages(), fs.pool.quota.used_count()),
            (0, 1),
            "the file has its page"
        );
    }

    #[test]
    fn pages_are_found_counted_and_taken_out_across_chunks() {
        let pool = PagePool::new(None, 64);
        let mut map = PageMap::default();
        let indexes = [0, 1, 63, 64, 200, 1 << 50];
        for index in indexes {
            pool.reserve(1).unwrap();
            map.insert(index, pool.page(true).unwrap());
        }
        assert_eq!(map.len(), 6);
        assert_eq!(map.next_present(2), Some(63));
        assert_eq!(map.next_present(65), Some(200));
        assert_eq!(map.next_present(201), Some(1 << 50));
        assert_eq!(map.next_present((1 << 50) + 1), None);
        assert_eq!((map.next_absent(0), map.next_absent(63), map.next_absent(5)), (2, 65, 5));
        assert_eq!(map.holes(0, 65), 61);
        assert_eq!(map.holes(63, 201), 135);

        let mut gone = Vec::new();
        map.remove(1, 201, |index, page| {
            gone.push(index);
            pool.give_back(page);
        });
        assert_eq!(gone, [1, 63, 64, 200]);
        assert_eq!((map.len(), pool.quota.used_count()), (2, 2));
        assert!(map.get(0).is_some() && map.get(64).is_none());
    }

    #[test]
    fn the_pool_never_exceeds_its_limit_and_clears_pages_that_are_used_again() {
        let pool = PagePool::new(Some(2), 64);
        pool.reserve(2).unwrap();
        assert_eq!(pool.reserve(1), Err(Errno::ENOSPC));
        let mut page = pool.page(true).unwrap();
        page.fill(7);
        pool.give_back(page);
        pool.reserve(1).unwrap();
        assert!(pool.page(true).unwrap().iter().all(|&byte| byte == 0));
    }
}
