//! The kernel mount: FUSE protocol, transports, sessions, mounting.
