//! Several clients that change the same files at random, beside a model.

mod checks;
mod client;
mod episode;
mod history;
mod world;

pub use client::ComparedClient;
pub use episode::{ClientEpisode, EpisodeCounts};
