//! Draws lines on a terminal in the place of those before.

/// Draws frames of lines, each over the one before. What the terminal showed above stays.
#[derive(Debug, Default)]
pub struct Redraw {
    /// Lines of the last frame.
    lines: usize,
}

impl Redraw {
    /// The bytes that replace the last frame, on a terminal of `rows` rows. Lines beyond them are cut off: the cursor
    /// could not come back to those that have scrolled away.
    pub fn frame(&mut self, lines: &[String], rows: usize) -> String {
        let room = rows.saturating_sub(1).max(1);
        let mut text = String::from("\r");
        // Moving up by 0 lines moves up by one.
        if self.lines > 0 {
            text += &format!("\x1b[{}A", self.lines);
        }
        for line in lines.iter().take(room) {
            text += &format!("{line}\x1b[K\n");
        }
        // Clears what a longer frame has left below.
        text += "\x1b[J";
        self.lines = lines.len().min(room);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_replaces_the_one_before() {
        let lines = |n: usize| vec!["x".to_owned(); n];
        let mut redraw = Redraw::default();
        assert_eq!(redraw.frame(&lines(2), 24), "\rx\x1b[K\nx\x1b[K\n\x1b[J");
        assert_eq!(redraw.frame(&lines(1), 24), "\r\x1b[2Ax\x1b[K\n\x1b[J");
        let long = redraw.frame(&lines(100), 4);
        assert_eq!((long.matches('\n').count(), &long[..5]), (3, "\r\x1b[1A"));
        assert!(redraw.frame(&lines(100), 4).starts_with("\r\x1b[3A"));
    }
}
