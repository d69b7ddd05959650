//! A table for the terminal.

/// Sizes columns by their widest text; the first is left-aligned, numbers are right-aligned.
pub fn render(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let texts = rows.iter().filter_map(|row| row.get(column));
        texts.map(|text| text.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (text, &width))| {
            let left = column == 0 || (columns <= 3 && column == columns - 1);
            if left { format!("{text:<width$}") } else { format!("{text:>width$}") }
        });
        let line = cells.collect::<Vec<_>>().join("  ");
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows: Vec<Vec<String>> = [["a", "1", "x", "v"], ["bbb", "22", "±", "v"]]
            .map(|r| r.map(String::from).to_vec())
            .to_vec();
        assert_eq!(render(&rows), "a     1  x  v\nbbb  22  ±  v\n");
    }
}
