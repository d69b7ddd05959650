//! The language: from text to statements. Nothing here opens a file or runs anything.

pub mod ast;
pub mod diagnostic;
mod lex;
mod parse;
pub mod schema;

pub use diagnostic::{LanguageDiagnostic, SourcePosition};
pub use parse::{parse, parse_assignment};
