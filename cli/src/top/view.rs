//! The full-screen view of `defuse top`.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Paragraph, Row as TableRow, Table, TableState};

use super::model::{ConnectionRow, OpRow, TopModel};
use super::plain::{SERVER_HEADS, cells, server_cells, server_name, time};
use super::servers::ServerRow;
use crate::served::{self, ClientRow};
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
pub struct TopView {
    /// The selected row.
    pub selected: usize,
    /// Show the operations of the selected connection or server.
    pub detail: bool,
    /// Take no new samples.
    pub held: bool,
    /// Quit.
    pub quit: bool,
}

impl TopView {
    /// Draws one frame.
    pub fn draw(&mut self, frame: &mut Frame, model: &TopModel) {
        self.draw_rows(frame, (&model.rows, &model.servers), &model.notes);
    }

    fn draw_rows(
        &mut self,
        frame: &mut Frame,
        (rows, servers): (&[ConnectionRow], &[ServerRow]),
        notes: &[String],
    ) {
        self.selected = self.selected.min((rows.len() + servers.len()).saturating_sub(1));
        let note_lines = u16::try_from(notes.len()).unwrap_or(u16::MAX).min(3);
        let lines = [Constraint::Min(3), Constraint::Length(note_lines), Constraint::Length(1)];
        let [main, below, keys] = Layout::vertical(lines).areas(frame.area());
        let server = self.selected.checked_sub(rows.len()).and_then(|at| servers.get(at));
        match (rows.get(self.selected), server) {
            (Some(row), _) if self.detail => draw_operations(frame, main, &row.ops, title(row)),
            (_, Some(row)) if self.detail => draw_server(frame, main, row),
            _ => self.draw_all(frame, main, rows, servers),
        }
        let notes: Vec<Line> = notes.iter().map(|note| Line::from(note.as_str())).collect();
        frame.render_widget(Paragraph::new(notes), below);
        let keys_line = if self.held { format!("HELD  {KEYS}") } else { KEYS.to_owned() };
        frame.render_widget(Paragraph::new(keys_line).style(reverse_style()), keys);
    }

    /// Draws the two tables; servers have at most half of the room, unless there is nothing else.
    fn draw_all(
        &self,
        frame: &mut Frame,
        area: Rect,
        rows: &[ConnectionRow],
        servers: &[ServerRow],
    ) {
        // Two lines of the border, and the heads.
        let needs = |rows: usize| u16::try_from(rows + 3).unwrap_or(u16::MAX);
        let room = match (rows.len(), servers.len()) {
            (_, 0) => 0,
            (0, count) => needs(count).min(area.height.saturating_sub(needs(0))),
            (_, count) => needs(count).min(area.height / 2),
        };
        let [above, below] =
            Layout::vertical([Constraint::Min(0), Constraint::Length(room)]).areas(area);
        self.draw_connections(frame, above, rows);
        if room > 0 {
            self.draw_servers(frame, below, servers, rows.len());
        }
    }

    fn draw_servers(&self, frame: &mut Frame, area: Rect, servers: &[ServerRow], from: usize) {
        let lines = servers.iter().map(|row| {
            let cells = server_cells(row).into_iter().chain([server_name(row)]);
            TableRow::new(cells.map(Cell::from))
        });
        let table = Table::new(lines, widths(&SERVER_HEADS))
            .header(TableRow::new(SERVER_HEADS).style(bold()))
            .row_highlight_style(reverse_style())
            .block(Block::bordered().title(format!(" servers: {} ", servers.len())));
        let mut state = TableState::default();
        state.select(self.selected.checked_sub(from));
        frame.render_stateful_widget(table, area, &mut state);
    }

    fn draw_connections(&self, frame: &mut Frame, area: Rect, rows: &[ConnectionRow]) {
        let lines = rows.iter().map(|row| {
            let mount = format!("{} ({})", terminal::escape_controls(&row.mount), row.fstype);
            TableRow::new(cells(row).into_iter().chain([mount]).map(Cell::from))
        });
        let title = format!(" FUSE connections: {} ", rows.len());
        let table = Table::new(lines, widths(&HEADS))
            .header(TableRow::new(HEADS).style(bold()))
            .row_highlight_style(reverse_style())
            .block(Block::bordered().title(title));
        let mut state = TableState::default();
        state.select((self.selected < rows.len()).then_some(self.selected));
        frame.render_stateful_widget(table, area, &mut state);
    }
}

/// The widths of columns, of which the last one has the rest.
fn widths(heads: &[&str]) -> Vec<Constraint> {
    let mut widths: Vec<_> =
        heads.iter().map(|head| Constraint::Length(head.len() as u16)).collect();
    if let Some(last) = widths.last_mut() {
        *last = Constraint::Min(10);
    }
    widths
}

fn title(row: &ConnectionRow) -> String {
    format!(
        " {}: {} ({}), pid {:?}, {} threads ",
        terminal::escape_controls(&row.mount),
        row.fstype,
        terminal::escape_controls(&row.daemon),
        row.pids,
        row.threads
    )
}

/// The operations of a server above its clients.
fn draw_server(frame: &mut Frame, area: Rect, row: &ServerRow) {
    let ServerRow { pid, threads, clients_left_out, .. } = row;
    let halves = [Constraint::Fill(1), Constraint::Fill(1)];
    let [above, below] = Layout::vertical(halves).areas(area);
    let title = format!(" {}, pid {pid}, {threads} threads ", server_name(row));
    draw_operations(frame, above, &row.ops, title);
    let width = |at: usize, head: &str| {
        let cells = row.clients.iter().map(|client| client.fields()[at].chars().count());
        Constraint::Length(cells.max().unwrap_or(0).max(head.len()) as u16)
    };
    let widths = served::COLUMNS.iter().enumerate().map(|(at, head)| width(at, head));
    let title = match clients_left_out {
        0 => format!(" clients: {} ", row.clients.len()),
        others => format!(" clients: {}, and {others} others ", row.clients.len()),
    };
    let lines = row.clients.iter().map(ClientRow::fields).map(TableRow::new);
    let table = Table::new(lines, widths)
        .header(TableRow::new(served::COLUMNS).style(bold()))
        .block(Block::bordered().title(title));
    frame.render_widget(table, below);
}

fn draw_operations(frame: &mut Frame, area: Rect, ops: &[OpRow], title: String) {
    let heads =
        ["OP", "OPS/S", "P50", "P99", "BACKGROUND", "PENDING", "PROCESSING", "ERRORS/S", "KIB/S"];
    let mut widths = heads.map(|head| Constraint::Length((head.len() as u16).max(10)));
    // The longest name of an operation.
    widths[0] = Constraint::Length(15);
    let table = Table::new(ops.iter().map(operation), widths)
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

fn reverse_style() -> Style {
    Style::new().add_modifier(Modifier::REVERSED)
}

#[cfg(test)]
mod tests {
    use super::super::model::tests::example;
    use super::super::servers::tests::example_row;
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn draw_to_text(view: &mut TopView, rows: &[ConnectionRow], width: u16) -> String {
        draw_with(view, (rows, &[]), width)
    }

    fn draw_with(view: &mut TopView, rows: (&[ConnectionRow], &[ServerRow]), width: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, 12)).unwrap();
        let notes = ["something is not seen".to_owned()];
        terminal.draw(|frame| view.draw_rows(frame, rows, &notes)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn connections_and_their_operations_are_drawn() {
        let rows = [example(43, "/mnt/a", 10), example(44, "/mnt/b", 20)];
        let mut view = TopView { selected: 7, ..TopView::default() };
        let text = draw_to_text(&mut view, &rows, 120);
        for part in ["FUSE connections: 2", "/mnt/a (fuse.sshfs)", "9!", "12/9", "something is not"]
        {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert_eq!(view.selected, 1, "the selection stays on an existing row");
        view.detail = true;
        let text = draw_to_text(&mut view, &rows, 120);
        for part in ["/mnt/b: fuse.sshfs (sshfs)", "READ", "2.0 us", "8.0 us"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }

    #[test]
    fn servers_are_drawn_below_connections_and_their_clients_below_their_operations() {
        let (rows, servers) = ([example(43, "/mnt/a", 10)], [example_row()]);
        let mut view = TopView { selected: 7, ..TopView::default() };
        let text = draw_with(&mut view, (&rows, &servers), 200);
        for part in ["FUSE connections: 1", "/mnt/a (fuse.sshfs)", "servers: 1", "/run/x (memory:)"]
        {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert_eq!(view.selected, 1, "the server");
        view.detail = true;
        let text = draw_with(&mut view, (&rows, &servers), 200);
        for part in ["/run/x (memory:), pid 9", "READ", "clients: 2, and 2 others", "4711", "1000"]
        {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        view.selected = 0;
        assert!(draw_with(&mut view, (&rows, &servers), 200).contains("/mnt/a: fuse.sshfs"));
        for width in [1, 5, 30] {
            draw_with(&mut view, (&[], &servers), width);
            draw_with(&mut TopView::default(), (&[], &servers), width);
        }
    }

    #[test]
    fn a_small_terminal_and_no_connections_do_not_panic() {
        let mut view = TopView { detail: true, ..TopView::default() };
        assert!(draw_to_text(&mut view, &[], 80).contains("FUSE connections: 0"));
        for width in [1, 2, 5, 20] {
            draw_to_text(&mut view, &[example(43, "/mnt/a", 1)], width);
        }
    }
}
