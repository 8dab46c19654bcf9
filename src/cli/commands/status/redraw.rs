//! Draws lines on a terminal in the place of those before.

use crate::cli::terminal_text::TerminalSize;

/// Draws frames of lines, each over the one before. What the terminal showed above stays.
#[derive(Debug, Default)]
pub struct Redraw {
    /// Lines of the last frame.
    lines: usize,
}

impl Redraw {
    /// The bytes that replace the last frame. The last line says how many lines the terminal has no room for: the cursor
    /// could not come back to those that have scrolled away.
    pub fn frame(&mut self, lines: &[String], size: TerminalSize) -> String {
        let room = size.rows.saturating_sub(1).max(1);
        let shown = if lines.len() > room { room - 1 } else { lines.len() };
        let rest = (shown < lines.len()).then(|| {
            let rest = format!("… {} more lines; ckptfs status shows all", lines.len() - shown);
            rest.chars().take(size.columns).collect()
        });
        let mut text = String::from("\r");
        // Moving up by 0 lines moves up by one.
        if self.lines > 0 {
            text += &format!("\x1b[{}A", self.lines);
        }
        for line in lines[..shown].iter().chain(&rest) {
            text += &format!("{line}\x1b[K\n");
        }
        // Clears what a longer frame has left below.
        text += "\x1b[J";
        self.lines = shown + usize::from(rest.is_some());
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_replaces_the_one_before() {
        let lines = |n: usize| vec!["x".to_owned(); n];
        let size = |rows| TerminalSize { columns: 80, rows };
        let mut redraw = Redraw::default();
        assert_eq!(redraw.frame(&lines(2), size(24)), "\rx\x1b[K\nx\x1b[K\n\x1b[J");
        assert_eq!(redraw.frame(&lines(1), size(24)), "\r\x1b[2Ax\x1b[K\n\x1b[J");
        let long = redraw.frame(&lines(100), size(4));
        assert_eq!((long.matches('\n').count(), &long[..5]), (3, "\r\x1b[1A"));
        assert!(redraw.frame(&lines(100), size(4)).starts_with("\r\x1b[3A"));
    }

    #[test]
    fn the_last_line_says_how_many_are_left_out() {
        let lines: Vec<String> = (0..5).map(|n| n.to_string()).collect();
        let frame = |rows, columns| {
            let text = Redraw::default().frame(&lines, TerminalSize { columns, rows });
            let shown = text.replace("\x1b[K", "").replace("\x1b[J", "");
            shown.trim_start().lines().map(str::to_owned).collect::<Vec<String>>()
        };
        assert_eq!(frame(6, 80), ["0", "1", "2", "3", "4"]);
        assert_eq!(frame(5, 80), ["0", "1", "2", "… 2 more lines; ckptfs status shows all"]);
        assert_eq!(frame(3, 80), ["0", "… 4 more lines; ckptfs status shows all"]);
        assert_eq!(frame(1, 80), ["… 5 more lines; ckptfs status shows all"]);
        assert_eq!(frame(1, 14), ["… 5 more lines"]);
    }
}
