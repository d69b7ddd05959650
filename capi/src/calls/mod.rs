//! The exported functions, which convert C arguments to calls of the client. Each file is a family
//! with one manual page: its first line is the title, the rest is the description.

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
