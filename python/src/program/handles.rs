//! The objects that `open` and `create` of a file system in Python have returned.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use defuse_fs::Fh;
use pyo3::prelude::*;
use pyo3::types::PyAny;

/// The objects of open files, by their numbers. 0 stands for no object.
#[derive(Default)]
pub struct OpenObjects(Mutex<ObjectTable>);

#[derive(Default)]
struct ObjectTable {
    objects: HashMap<u64, Py<PyAny>>,
    last: u64,
}

impl OpenObjects {
    fn table(&self) -> MutexGuard<'_, ObjectTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an object until [`remove`](Self::remove).
    pub fn insert(&self, object: &Bound<'_, PyAny>) -> Fh {
        if object.is_none() {
            return Fh(0);
        }
        let mut table = self.table();
        table.last += 1;
        let number = table.last;
        table.objects.insert(number, object.clone().unbind());
        Fh(number)
    }

    /// The object of an open file, or None.
    pub fn object(&self, py: Python<'_>, fh: Option<Fh>) -> Py<PyAny> {
        let found = fh.and_then(|fh| Some(self.table().objects.get(&fh.0)?.clone_ref(py)));
        found.unwrap_or_else(|| py.None())
    }

    /// Forgets the object of an open file.
    pub fn remove(&self, fh: Fh) -> Option<Py<PyAny>> {
        self.table().objects.remove(&fh.0)
    }
}
