//! `defuse dump`.

use std::fmt::Write as _;
use std::path::PathBuf;

use defuse_fs::source::{DumpCell, DumpTable};
use serde_json::{Map, Value, json};

use crate::error::{Result, print};
use crate::{images, paths};

/// Show the structures of the file system in an image
///
/// For the study and repair of images: superblocks, units, slots and groups, or all that is stored
/// about one inode. Shows names of files, and none of their data. Writes nothing, and shows of a
/// damaged image what can be read. The image must not be in use.
#[derive(clap::Args)]
pub struct DumpArgs {
    /// The file or block device
    image: PathBuf,
    /// Show the inode with this number
    #[arg(long, value_name = "NUMBER")]
    inode: Option<u64>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Prints the tables.
pub fn run(args: &DumpArgs) -> Result {
    let tables = images::open(&paths::image(&args.image), false)?.dump(args.inode)?;
    match args.json {
        true => print(&format!("{:#}\n", as_json(&tables))),
        false => print(&tables.iter().map(text).collect::<Vec<_>>().join("\n")),
    }
}

fn format_cell(cell: &DumpCell) -> String {
    match cell {
        DumpCell::Number(number) => number.to_string(),
        DumpCell::Text(text) => text.clone(),
    }
}

fn text(table: &DumpTable) -> String {
    let rows: Vec<Vec<String>> =
        table.rows.iter().map(|row| row.iter().map(format_cell).collect()).collect();
    let heads = table.columns.iter().map(|column| column.replace('_', " "));
    let all: Vec<Vec<String>> = std::iter::once(heads.collect()).chain(rows).collect();
    let width = |column: usize| {
        all.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> =
        (0..table.columns.len()).map(|column| width(column).unwrap_or(0)).collect();
    let mut out = format!("{}\n", table.name.replace('_', " "));
    if table.rows.is_empty() {
        return out + "  none\n";
    }
    for row in &all {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        let line = cells.collect::<Vec<_>>().join("  ");
        let _ = writeln!(out, "  {}", line.trim_end());
    }
    out
}

fn as_json(tables: &[DumpTable]) -> Value {
    let value = |cell: &DumpCell| match cell {
        DumpCell::Number(number) => json!(number),
        DumpCell::Text(text) => json!(text),
    };
    let row = |table: &DumpTable, row: &[DumpCell]| -> Value {
        let pairs = table.columns.iter().zip(row);
        Value::Object(pairs.map(|(name, cell)| ((*name).to_owned(), value(cell))).collect())
    };
    let tables = tables.iter().map(|table| {
        let rows = table.rows.iter().map(|cells| row(table, cells)).collect();
        (table.name.to_owned(), Value::Array(rows))
    });
    Value::Object(tables.collect::<Map<_, _>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_aligned_columns_as_text_and_an_object_for_each_row_as_json() {
        let table = |rows| DumpTable { name: "a_b", columns: &["first_one", "two"], rows };
        let full = table(vec![vec![DumpCell::from(7_u64), DumpCell::from("x")]]);
        assert_eq!(text(&full), "a b\n  first one  two\n  7          x\n");
        assert_eq!(text(&table(Vec::new())), "a b\n  none\n");
        assert_eq!(as_json(&[full]), json!({"a_b": [{"first_one": 7, "two": "x"}]}));
    }
}
