class NoCharts(Exception): pass
def write(*a): raise NoCharts("x")
