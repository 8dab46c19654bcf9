//! Surveys of what a mount shows, which run while it is made.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::threads::spawn;
use crate::view::{RefusedView, Survey, View};

/// How long a mount waits to know whether it shows any virtual file. Most show one in the first directory.
const SURVEY_TIMEOUT: Duration = Duration::from_millis(500);

/// What a mount showed when it was made. What was not known in time is missing.
#[derive(Debug, Default)]
pub struct MountSurvey {
    /// What it shows of checkpoints.
    pub shown: Option<Survey>,
    /// Files of its recipe that are not shown.
    pub refused_views: Vec<RefusedView>,
}

/// Surveys of the view that run while the mount is made.
pub struct RunningSurvey {
    results: mpsc::Receiver<SurveyResult>,
    sender: mpsc::Sender<SurveyResult>,
    until: Instant,
}

enum SurveyResult {
    Shown(Option<Survey>),
    Refused(RefusedView),
}

impl RunningSurvey {
    pub fn start(view: &Arc<View>) -> RunningSurvey {
        let (sender, results) = mpsc::channel();
        let survey = RunningSurvey { results, sender, until: Instant::now() + SURVEY_TIMEOUT };
        survey.spawn(view, |view, until, send| send(SurveyResult::Shown(view.survey(until))));
        survey
    }

    /// Looks up the files of the recipe, too. The mount itself must be excluded by then.
    pub fn look_up_recipe(&self, view: &Arc<View>) {
        self.spawn(view, |view, until, send| {
            view.find_refused_views(until, |refused| send(SurveyResult::Refused(refused)));
        });
    }

    /// Runs work on a thread that may outlive this. Without a thread there is no result.
    fn spawn(
        &self,
        view: &Arc<View>,
        work: impl FnOnce(&View, Instant, &dyn Fn(SurveyResult)) + Send + 'static,
    ) {
        let (view, until, sender) = (Arc::clone(view), self.until, self.sender.clone());
        // Sending fails if the mount was not made, or did not wait.
        let work = move || work(&view, until, &|result| drop(sender.send(result)));
        let _ = spawn("ckptfs survey", work);
    }

    /// The results that come in time.
    pub fn finish(self) -> MountSurvey {
        let RunningSurvey { results, sender, until } = self;
        drop(sender);
        let mut survey = MountSurvey::default();
        let next = || {
            let remaining = until.saturating_duration_since(Instant::now());
            results.recv_timeout(remaining).ok()
        };
        while let Some(result) = next() {
            match result {
                SurveyResult::Shown(shown) => survey.shown = shown,
                SurveyResult::Refused(refused) => survey.refused_views.push(refused),
            }
        }
        survey
    }
}
