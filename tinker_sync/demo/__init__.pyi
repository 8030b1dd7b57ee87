from tinker_sync.demo.course import main as main
from tinker_sync.demo.course import run as run
from tinker_sync.demo.lessons import RECIPE as RECIPE
from tinker_sync.demo.result import DemoResult as DemoResult
from tinker_sync.demo.result import Steps as Steps
