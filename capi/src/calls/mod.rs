//! The exported functions: each turns what C gave into a call of the client. A file is a family, and
//! a manual page: its first line is the page's title, what follows the description.

#![allow(unsafe_code)]

mod aio;
mod attributes;
mod data;
mod directory;
mod locks;
mod mapping;
mod mount;
mod names;
mod open;
mod status;
mod storage;
mod workdir;
mod xattrs;
