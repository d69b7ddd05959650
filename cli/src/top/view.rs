//! The full-screen view of `defuse top`.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Paragraph, Row as TableRow, Table, TableState};

use super::model::{Model, OpRow, Row};
use super::plain::{cells, time};
use crate::terminal;

const HEADS: [&str; 12] = [
    " CONN",
    "    OPS/S",
    "      P50",
    "      P99",
    "BACKG",
    " PEND",
    " PROC",
    "WAIT ",
    " MAX/CG",
    " THR",
    "  CPU%",
    "MOUNT",
];
const KEYS: &str = "arrows select  Enter operations  sort by: o ops p p99 w waiting c cpu n name  space hold  q quit";

/// The state of the view, as the user's keys left it.
#[derive(Debug, Default)]
pub struct View {
    /// The selected row.
    pub selected: usize,
    /// Show the operations of the selected connection.
    pub detail: bool,
    /// Take no new samples.
    pub held: bool,
    /// Quit.
    pub quit: bool,
}

impl View {
    /// Draws one frame.
    pub fn draw(&mut self, frame: &mut Frame, model: &Model) {
        self.draw_rows(frame, &model.rows, &model.notes);
    }

    fn draw_rows(&mut self, frame: &mut Frame, rows: &[Row], notes: &[String]) {
        self.selected = self.selected.min(rows.len().saturating_sub(1));
        let note_lines = u16::try_from(notes.len()).unwrap_or(1).min(3);
        let lines = [Constraint::Min(3), Constraint::Length(note_lines), Constraint::Length(1)];
        let [main, below, keys] = Layout::vertical(lines).areas(frame.area());
        match rows.get(self.selected).filter(|_| self.detail) {
            Some(row) => draw_operations(frame, main, row),
            None => self.draw_connections(frame, main, rows),
        }
        let notes: Vec<Line> = notes.iter().map(|note| Line::from(note.as_str())).collect();
        frame.render_widget(Paragraph::new(notes), below);
        let keys_line = if self.held { format!("HELD  {KEYS}") } else { KEYS.to_owned() };
        frame.render_widget(Paragraph::new(keys_line).style(reversed()), keys);
    }

    fn draw_connections(&self, frame: &mut Frame, area: Rect, rows: &[Row]) {
        let widths = HEADS.map(|head| Constraint::Length(head.len() as u16));
        let mut widths = widths.to_vec();
        if let Some(last) = widths.last_mut() {
            *last = Constraint::Min(10);
        }
        let lines = rows.iter().map(|row| {
            let mount = format!("{} ({})", terminal::foreign(&row.mount), row.fstype);
            TableRow::new(cells(row).into_iter().chain([mount]).map(Cell::from))
        });
        let title = format!(" FUSE connections: {} ", rows.len());
        let table = Table::new(lines, widths)
            .header(TableRow::new(HEADS).style(bold()))
            .row_highlight_style(reversed())
            .block(Block::bordered().title(title));
        let mut state = TableState::default();
        state.select((!rows.is_empty()).then_some(self.selected));
        frame.render_stateful_widget(table, area, &mut state);
    }
}

fn draw_operations(frame: &mut Frame, area: Rect, row: &Row) {
    let heads =
        ["OP", "OPS/S", "P50", "P99", "BACKGROUND", "PENDING", "PROCESSING", "ERRORS/S", "KIB/S"];
    let mut widths = heads.map(|head| Constraint::Length((head.len() as u16).max(10)));
    // The longest name of an operation.
    widths[0] = Constraint::Length(15);
    let title = format!(
        " {}: {} ({}), pid {:?}, {} threads ",
        terminal::foreign(&row.mount),
        row.fstype,
        terminal::foreign(&row.daemon),
        row.pids,
        row.threads
    );
    let table = Table::new(row.ops.iter().map(operation), widths)
        .header(TableRow::new(heads).style(bold()))
        .block(Block::bordered().title(title));
    frame.render_widget(table, area);
}

fn operation(op: &OpRow) -> TableRow<'static> {
    let mean = |ns: Option<u64>| time(ns.unwrap_or(0));
    TableRow::new([
        op.op.name().to_owned(),
        format!("{:.1}", op.per_second),
        time(op.p50_ns),
        time(op.p99_ns),
        mean(op.background_ns),
        mean(op.pending_ns),
        mean(op.processing_ns),
        format!("{:.1}", op.errors_per_second),
        format!("{:.1}", op.bytes_per_second / 1024.0),
    ])
}

fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn reversed() -> Style {
    Style::new().add_modifier(Modifier::REVERSED)
}

#[cfg(test)]
mod tests {
    use super::super::model::tests::example;
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn drawn(view: &mut View, rows: &[Row], width: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, 12)).unwrap();
        let notes = ["something is not seen".to_owned()];
        terminal.draw(|frame| view.draw_rows(frame, rows, &notes)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn connections_and_their_operations_are_drawn() {
        let rows = [example(43, "/mnt/a", 10), example(44, "/mnt/b", 20)];
        let mut view = View { selected: 7, ..View::default() };
        let text = drawn(&mut view, &rows, 120);
        for part in ["FUSE connections: 2", "/mnt/a (fuse.sshfs)", "9!", "12/9", "something is not"]
        {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert_eq!(view.selected, 1, "the selection stays on an existing row");
        view.detail = true;
        let text = drawn(&mut view, &rows, 120);
        for part in ["/mnt/b: fuse.sshfs (sshfs)", "READ", "2.0 us", "8.0 us"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }

    #[test]
    fn a_small_terminal_and_no_connections_do_not_panic() {
        let mut view = View { detail: true, ..View::default() };
        assert!(drawn(&mut view, &[], 80).contains("FUSE connections: 0"));
        for width in [1, 2, 5, 20] {
            drawn(&mut view, &[example(43, "/mnt/a", 1)], width);
        }
    }
}
